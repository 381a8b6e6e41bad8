//! Rendering: helm as a process, its output as values.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

use serde_json::Value;

/// The namespace that charts are rendered for.
pub(crate) const NAMESPACE: &str = "sluice-system";
/// Fixed, so that golden files do not change with helm's version.
const KUBE_VERSION: &str = "1.34.0";

pub(crate) fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

pub(crate) fn chart() -> PathBuf {
    repository().join("charts/sluice")
}

static HELM: LazyLock<PathBuf> = LazyLock::new(|| {
    if let Some(helm) = std::env::var_os("HELM") {
        return helm.into();
    }
    let path = std::env::var("PATH").unwrap_or_default();
    let cluster = Command::new(repository().join("integration/cluster/env.sh"))
        .output()
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default();
    let built = cluster
        .lines()
        .filter_map(|line| line.strip_prefix("export PATH="))
        .filter_map(|path| path.split(':').next());
    path.split(':')
        .chain(built)
        .map(|directory| Path::new(directory).join("helm"))
        .find(|helm| helm.is_file())
        .expect("no helm: set HELM, or let `make cluster` build one")
});

/// Runs helm.
pub(crate) fn helm(args: &[&str]) -> Output {
    Command::new(&*HELM)
        .args(args)
        .output()
        .unwrap_or_else(|error| panic!("{}: {error}", HELM.display()))
}

fn template(set: &[&str], kube_version: &str) -> Output {
    let chart = chart().display().to_string();
    let mut args = vec![
        "template",
        "mesh",
        &chart,
        "--namespace",
        NAMESPACE,
        "--kube-version",
        kube_version,
    ];
    for value in set {
        // `file:PATH`: a file of values; anything else: one value.
        args.extend(match value.strip_prefix("file:") {
            Some(path) => ["--values", path],
            None => ["--set", *value],
        });
    }
    helm(&args)
}

/// What helm prints for these values.
pub(crate) fn rendered_text(set: &[&str]) -> String {
    let output = template(set, KUBE_VERSION);
    assert!(
        output.status.success(),
        "{set:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// What helm says to values that it refuses.
pub(crate) fn refusal(set: &[&str]) -> String {
    let output = template(set, KUBE_VERSION);
    assert!(!output.status.success(), "{set:?} was accepted");
    String::from_utf8(output.stderr).unwrap()
}

/// The objects of a release.
#[derive(Debug)]
pub(crate) struct Release {
    pub(crate) objects: Vec<Value>,
}

impl Release {
    pub(crate) fn render(set: &[&str]) -> Self {
        Self::parse(&rendered_text(set))
    }

    /// As a cluster of an older version gets it.
    pub(crate) fn render_for(kube_version: &str, set: &[&str]) -> Self {
        let output = template(set, kube_version);
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        Self::parse(&String::from_utf8(output.stdout).unwrap())
    }

    fn parse(text: &str) -> Self {
        let objects: Vec<Option<Value>> = serde_saphyr::from_multiple(text).unwrap();
        Self {
            objects: objects.into_iter().flatten().collect(),
        }
    }

    /// `Kind/name` of every object, sorted.
    pub(crate) fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self
            .objects
            .iter()
            .map(|object| format!("{}/{}", text(object, "/kind"), text(object, "/metadata/name")))
            .collect();
        names.sort();
        names
    }

    pub(crate) fn object(&self, kind: &str, name: &str) -> &Value {
        self.objects
            .iter()
            .find(|object| text(object, "/kind") == kind && text(object, "/metadata/name") == name)
            .unwrap_or_else(|| panic!("no {kind}/{name} in {:?}", self.names()))
    }

    pub(crate) fn pod(&self) -> &Value {
        &self.object("DaemonSet", "sluice-node")["spec"]["template"]
    }

    /// Every container with its name.
    pub(crate) fn containers(&self) -> Vec<(&str, &Value)> {
        let spec = &self.pod()["spec"];
        assert!(
            spec["initContainers"].is_null(),
            "each costs a rollout one of the kubelet's looks"
        );
        let containers = spec["containers"].as_array().unwrap();
        containers
            .iter()
            .map(|container| (container["name"].as_str().unwrap(), container))
            .collect()
    }

    pub(crate) fn container(&self, name: &str) -> &Value {
        let containers = self.containers();
        let found = containers.iter().find(|(known, _)| *known == name);
        found.unwrap_or_else(|| panic!("no container {name}")).1
    }

    /// Host path of each hostPath volume that a container mounts, with where and how.
    pub(crate) fn host_paths(&self, container: &str) -> Vec<HostPath> {
        let volumes = self.pod()["spec"]["volumes"].as_array().unwrap();
        let mounts = self.container(container)["volumeMounts"].as_array().unwrap();
        mounts
            .iter()
            .filter_map(|mount| {
                let volume = volumes
                    .iter()
                    .find(|volume| volume["name"] == mount["name"])
                    .unwrap();
                Some(HostPath {
                    host: volume["hostPath"]["path"].as_str()?.to_owned(),
                    at: mount["mountPath"].as_str().unwrap().to_owned(),
                    read_only: mount["readOnly"] == true,
                    propagation: mount["mountPropagation"].as_str().map(str::to_owned),
                })
            })
            .collect()
    }

    /// The value that follows a flag on a container's command line.
    pub(crate) fn flag(&self, container: &str, flag: &str) -> Option<String> {
        let args: Vec<&str> = self.container(container)["args"]
            .as_array()
            .unwrap()
            .iter()
            .map(|arg| arg.as_str().unwrap())
            .collect();
        let at = args.iter().position(|arg| *arg == flag)?;
        Some((*args.get(at + 1)?).to_owned())
    }
}

/// One mount of a directory of the host.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct HostPath {
    pub(crate) host: String,
    pub(crate) at: String,
    pub(crate) read_only: bool,
    pub(crate) propagation: Option<String>,
}

/// A string at a JSON pointer.
pub(crate) fn text<'a>(value: &'a Value, pointer: &str) -> &'a str {
    let found = value.pointer(pointer).and_then(Value::as_str);
    found.unwrap_or_else(|| panic!("no {pointer} in {value:#}"))
}

/// The strings of a list, sorted; empty where there is none.
pub(crate) fn texts(value: &Value) -> Vec<&str> {
    let mut list: Vec<&str> = value
        .as_array()
        .map(|list| list.iter().map(|item| item.as_str().unwrap()).collect())
        .unwrap_or_default();
    list.sort_unstable();
    list
}
