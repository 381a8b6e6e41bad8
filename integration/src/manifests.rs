//! The directory of manifests that plays the API server: written as an operator would, renamed into place.

use std::io;
use std::path::{Path, PathBuf};

use sluice_testkit::pod::Pod;

/// The label that puts a namespace or a pod into the mesh or keeps it out.
pub const MODE_LABEL: &str = "istio.io/dataplane-mode";

/// A directory of Pod and Namespace manifests.
#[derive(Debug, Clone)]
pub struct Manifests(PathBuf);

/// What a pod's manifest says beyond its identity.
#[derive(Debug, Clone, Default)]
pub struct PodOptions {
    /// Labels.
    pub labels: Vec<(String, String)>,
    /// Annotations.
    pub annotations: Vec<(String, String)>,
    /// `spec.hostNetwork`.
    pub host_network: bool,
    /// `status.phase`; empty: Running.
    pub phase: String,
    /// Without `status.podIPs`, as before the runtime has answered.
    pub without_addresses: bool,
}

impl PodOptions {
    /// With the mode label set to `mode`.
    pub fn mode(mode: &str) -> Self {
        Self::default().label(MODE_LABEL, mode)
    }

    /// With one more label.
    #[must_use]
    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.labels.push((key.to_owned(), value.to_owned()));
        self
    }

    /// With one more annotation.
    #[must_use]
    pub fn annotation(mut self, key: &str, value: &str) -> Self {
        self.annotations.push((key.to_owned(), value.to_owned()));
        self
    }
}

impl Manifests {
    /// Makes the directory.
    pub fn create(path: impl Into<PathBuf>) -> io::Result<Self> {
        let path = path.into();
        std::fs::create_dir_all(&path)?;
        Ok(Self(path))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Writes any file, atomically.
    pub fn write(&self, file: &str, text: &str) -> io::Result<()> {
        let temporary = self.0.join(format!(".{file}.new"));
        std::fs::write(&temporary, text)?;
        std::fs::rename(temporary, self.0.join(file))
    }

    /// Declares a namespace with its mode label (`ambient`, `none`, or empty for no label).
    pub fn namespace(&self, name: &str, mode: &str) -> io::Result<()> {
        let labels = if mode.is_empty() {
            String::new()
        } else {
            format!("\n  labels: {{{MODE_LABEL}: {mode}}}")
        };
        let text = format!("apiVersion: v1\nkind: Namespace\nmetadata:\n  name: {name}{labels}\n");
        self.write(&format!("namespace-{name}.yaml"), &text)
    }

    /// Declares a pod, or changes it.
    pub fn pod(&self, pod: &Pod, options: &PodOptions) -> io::Result<()> {
        let ips: Vec<_> = pod
            .addresses()
            .iter()
            .map(|ip| serde_json::json!({ "ip": ip.to_string() }))
            .collect();
        let phase = if options.phase.is_empty() {
            "Running"
        } else {
            &options.phase
        };
        let map = |pairs: &[(String, String)]| {
            pairs
                .iter()
                .map(|(k, v)| (k.clone(), v.clone().into()))
                .collect::<serde_json::Map<_, serde_json::Value>>()
        };
        let mut manifest = serde_json::json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": pod.name(), "namespace": pod.namespace(), "uid": pod.uid(),
                "labels": map(&options.labels), "annotations": map(&options.annotations),
            },
            "spec": { "serviceAccountName": "default", "hostNetwork": options.host_network, "containers": [{ "name": "app" }] },
            "status": { "phase": phase },
        });
        if !options.without_addresses {
            manifest["status"]["podIPs"] = ips.into();
        }
        self.write(&Self::file_of(pod), &manifest.to_string())
    }

    /// Deletes a pod's manifest.
    pub fn delete_pod(&self, pod: &Pod) -> io::Result<()> {
        std::fs::remove_file(self.0.join(Self::file_of(pod)))
    }

    fn file_of(pod: &Pod) -> String {
        format!("pod-{}-{}.json", pod.namespace(), pod.name())
    }
}
