//! Which pods are the node agent's own, and which UID a container runtime knows a static pod by.

use serde::{Deserialize, Serialize};

use crate::Labels;

/// Annotation of a static pod: the hash of its manifest, which the kubelet gives the runtime as the pod's UID.
pub const CONFIG_HASH: &str = "kubernetes.io/config.hash";

/// Annotation of a mirror pod, the API server's image of a static pod: the static pod's hash. The mirror's own
/// `metadata.uid` is another one, of which the runtime knows nothing.
pub const CONFIG_MIRROR: &str = "kubernetes.io/config.mirror";

/// The DaemonSet that the node agent runs as.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct OwnPods {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub daemon_set: String,
}

impl OwnPods {
    /// Whether a pod of this namespace and name can be one of the DaemonSet's: its name, `-`, and the five characters
    /// that the DaemonSet controller appends. The name alone proves nothing: who sees the whole pod checks its owner.
    pub fn contains(&self, namespace: &str, name: &str) -> bool {
        namespace == self.namespace
            && name
                .strip_prefix(self.daemon_set.as_str())
                .and_then(|rest| rest.strip_prefix('-'))
                .is_some_and(|suffix| suffix.len() == 5 && suffix.bytes().all(is_suffix_byte))
    }
}

fn is_suffix_byte(byte: u8) -> bool {
    byte.is_ascii_lowercase() || byte.is_ascii_digit()
}

/// Whether a runtime's pod UID is a static pod's: 32 hexadecimal digits without dashes.
pub fn is_static_uid(uid: &str) -> bool {
    uid.len() == 32
        && uid
            .bytes()
            .all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// The UID by which the container runtime knows a pod: the hash for a static pod's mirror, else `metadata.uid`.
///
/// Annotations are the pod author's to write. A hash counts only in the form that the kubelet gives it, and a caller
/// must refuse a pod that so claims a UID another pod already has.
pub fn sandbox_uid<'a>(uid: &'a str, annotations: &'a Labels) -> &'a str {
    annotations
        .get(CONFIG_MIRROR)
        .map(String::as_str)
        .filter(|hash| is_static_uid(hash))
        .unwrap_or(uid)
}
