//! Where the container runtime itself says that it looks for plugins and network configurations, if its configuration is
//! there to be read.

use std::io;
use std::path::{Path, PathBuf};

use toml::{Table, Value};

use crate::files;

/// Directories as a runtime's configuration names them. Empty and `None`: it has the runtime's defaults.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RuntimeDirs {
    pub(crate) file: PathBuf,
    pub(crate) plugins: Vec<PathBuf>,
    pub(crate) configurations: Option<PathBuf>,
}

/// Reads a runtime's configuration. `None`: there is none, as for all runtimes but the node's.
pub(crate) fn read(path: &Path) -> Option<Result<RuntimeDirs, String>> {
    let bytes = match files::read(path) {
        Ok((bytes, _)) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => {
            return Some(Err(format!(
                "{}: {}",
                path.display(),
                sluice_runtime::telemetry::chain(&error)
            )));
        }
    };
    let parsed = String::from_utf8_lossy(&bytes).parse::<Table>();
    Some(match parsed {
        Ok(table) => Ok(RuntimeDirs {
            file: path.to_owned(),
            ..directories(&table)
        }),
        Err(error) => Err(format!("{} is not TOML: {}", path.display(), error.message())),
    })
}

/// Of containerd (the `cni` table of its CRI plugin, whose name differs between versions) or CRI-O (`crio.network`).
fn directories(table: &Table) -> RuntimeDirs {
    let tables = |value: Option<&Value>| value.and_then(Value::as_table).cloned().unwrap_or_default();
    let mut found = RuntimeDirs::default();
    let plugins = tables(table.get("plugins"));
    let cni = plugins.values().map(|plugin| tables(plugin.get("cni")));
    let crio = tables(table.get("crio").and_then(|crio| crio.get("network")));
    for section in cni.chain([crio]) {
        for key in ["bin_dir", "plugin_dir"] {
            found.plugins.extend(section.get(key).and_then(path));
        }
        for key in ["bin_dirs", "plugin_dirs"] {
            let list = section.get(key).and_then(Value::as_array);
            found.plugins.extend(list.into_iter().flatten().filter_map(path));
        }
        for key in ["conf_dir", "network_dir"] {
            found.configurations = section.get(key).and_then(path).or(found.configurations);
        }
    }
    found
}

fn path(value: &Value) -> Option<PathBuf> {
    let text = value.as_str().filter(|text| !text.is_empty())?;
    // Without a slash at the end.
    Some(Path::new(text).components().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> (Vec<String>, Option<String>) {
        let found = directories(&text.parse().unwrap());
        let text = |path: &PathBuf| path.display().to_string();
        (
            found.plugins.iter().map(text).collect(),
            found.configurations.as_ref().map(text),
        )
    }

    #[test]
    fn every_generation_of_every_runtime_is_understood() {
        let k3s = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".cni]\n  bin_dir = \"/var/lib/rancher/k3s/data/current/bin/\"\n  \
                   conf_dir = \"/var/lib/rancher/k3s/agent/etc/cni/net.d\"\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\n";
        let (plugins, configurations) = parse(k3s);
        assert_eq!(plugins, ["/var/lib/rancher/k3s/data/current/bin"]);
        assert_eq!(
            configurations.as_deref(),
            Some("/var/lib/rancher/k3s/agent/etc/cni/net.d")
        );

        let two = "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.cni]\nbin_dir = ''\nbin_dirs = ['/opt/cni/bin', '/usr/lib/cni']\n";
        assert_eq!(
            parse(two),
            (vec!["/opt/cni/bin".into(), "/usr/lib/cni".into()], None)
        );

        let crio = "[crio.network]\nnetwork_dir = \"/etc/cni/net.d/\"\nplugin_dirs = [\n\"/usr/libexec/cni\", \"/opt/cni/bin/\",\n]\n";
        let (plugins, configurations) = parse(crio);
        assert_eq!(plugins, ["/usr/libexec/cni", "/opt/cni/bin"]);
        assert_eq!(configurations.as_deref(), Some("/etc/cni/net.d"));

        assert_eq!(parse("version = 2\nplugins = 5\ncrio = []\n"), (vec![], None));
    }

    #[test]
    fn a_file_that_is_none_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config.toml");
        assert_eq!(read(&path), None);
        std::fs::write(&path, "[plugins\n").unwrap();
        assert!(
            read(&path)
                .unwrap()
                .unwrap_err()
                .contains("config.toml is not TOML: ")
        );
    }
}
