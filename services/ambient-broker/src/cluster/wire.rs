//! Objects of the API, with nothing but the fields that the broker needs: what is not named here is skipped while
//! it is read, above all `managedFields` and the containers.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::de::{DeserializeOwned, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use sluice_proto::id::{InvalidId, Namespace as NamespaceName, PodName, PodRef, PodUid};
use sluice_selection::{CONFIG_MIRROR, Labels, SIDECAR_STATUS};

use crate::source::fields::{self, Spec, Status};
use crate::source::{Namespace, Pod};

/// What a list and each of its objects have.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Metadata {
    pub(super) name: String,
    pub(super) namespace: String,
    pub(super) uid: String,
    /// Opaque to clients but for this: one object's later version is the greater number (Kubernetes API concepts,
    /// "Resource versions").
    #[serde(deserialize_with = "or_default")]
    pub(super) resource_version: String,
    pub(super) generation: i64,
    pub(super) deletion_timestamp: Option<String>,
    #[serde(deserialize_with = "or_default")]
    pub(super) labels: Labels,
    #[serde(deserialize_with = "annotations")]
    pub(super) annotations: Labels,
    #[serde(deserialize_with = "or_default")]
    pub(super) owner_references: Vec<Owner>,
    /// Of a list: where the next page begins.
    #[serde(rename = "continue")]
    pub(super) next: Option<String>,
}

impl Metadata {
    /// The version as a number; 0 where it is none.
    pub(super) fn version(&self) -> u64 {
        number(&self.resource_version)
    }
}

/// A resource version as a number; 0 where it is none.
pub(super) fn number(version: &str) -> u64 {
    version.parse().unwrap_or(0)
}

/// `metadata.ownerReferences[]`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Owner {
    pub(super) kind: String,
    pub(super) name: String,
    pub(super) uid: String,
    pub(super) controller: bool,
}

/// Something that can be listed and watched.
pub(super) trait Object: DeserializeOwned + Clone + Send + 'static {
    fn metadata(&self) -> &Metadata;
}

impl Object for MetadataOnly {
    fn metadata(&self) -> &Metadata {
        &self.metadata
    }
}

impl Object for RawPod {
    fn metadata(&self) -> &Metadata {
        &self.metadata
    }
}

/// A page of a list.
#[derive(Debug, Deserialize)]
#[serde(bound = "K: DeserializeOwned")]
pub(super) struct List<K> {
    #[serde(default)]
    pub(super) metadata: Metadata,
    #[serde(default = "Vec::new", deserialize_with = "items")]
    pub(super) items: Vec<K>,
}

/// An object of which only the metadata is asked for.
#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct MetadataOnly {
    #[serde(default)]
    pub(super) metadata: Metadata,
}

impl MetadataOnly {
    pub(super) fn namespace(self) -> Result<Arc<Namespace>, InvalidId> {
        Ok(Arc::new(Namespace {
            name: NamespaceName::parse(self.metadata.name)?,
            labels: self.metadata.labels,
        }))
    }
}

/// A pod.
#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct RawPod {
    #[serde(default)]
    pub(super) metadata: Metadata,
    #[serde(default)]
    spec: Spec,
    #[serde(default)]
    status: Status,
}

/// A pod as the source tells it, with what only this module needs.
#[derive(Debug, Clone)]
pub(super) struct WirePod {
    pub(super) pod: Arc<Pod>,
    /// `metadata.resourceVersion`.
    pub(super) version: u64,
    /// The controlling owner.
    pub(super) owner: Option<Owner>,
}

impl RawPod {
    pub(super) fn convert(self) -> Result<WirePod, InvalidId> {
        let Self {
            metadata,
            spec,
            status,
        } = self;
        let version = metadata.version();
        let id = PodRef {
            namespace: NamespaceName::parse(metadata.namespace)?,
            name: PodName::parse(metadata.name)?,
            uid: PodUid::parse(metadata.uid)?,
        };
        let pod = fields::pod(
            id,
            metadata.labels,
            metadata.annotations,
            metadata.deletion_timestamp,
            spec,
            &status,
        );
        Ok(WirePod {
            pod: Arc::new(pod),
            version,
            owner: metadata
                .owner_references
                .into_iter()
                .find(|owner| owner.controller),
        })
    }
}

/// `null` counts as absent, which is how Go writes an empty list or map.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

fn items<'de, D: Deserializer<'de>, K: Deserialize<'de>>(deserializer: D) -> Result<Vec<K>, D::Error> {
    Ok(Option::<Vec<K>>::deserialize(deserializer)?.unwrap_or_default())
}

/// Only annotations that mean something here: others can be as large as a manifest.
fn counts(key: &str) -> bool {
    key == SIDECAR_STATUS
        || key == CONFIG_MIRROR
        || key.starts_with("ambient.istio.io/")
        || key.starts_with("istio.io/")
}

fn annotations<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Labels, D::Error> {
    struct Few;
    impl<'de> Visitor<'de> for Few {
        type Value = Labels;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("annotations")
        }

        fn visit_unit<E>(self) -> Result<Labels, E> {
            Ok(Labels::new())
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Labels, A::Error> {
            let mut kept = BTreeMap::new();
            while let Some(key) = map.next_key::<String>()? {
                if counts(&key) {
                    kept.insert(key, map.next_value()?);
                } else {
                    map.next_value::<IgnoredAny>()?;
                }
            }
            Ok(kept)
        }
    }
    deserializer.deserialize_any(Few)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_selection::Phase;

    #[test]
    fn a_pod_keeps_what_counts_and_nothing_else() {
        let text = r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"p","namespace":"shop","uid":"u-1",
            "resourceVersion":"123","labels":{"a":"b"},"managedFields":[{"fieldsV1":{"f:x":{}}}],
            "annotations":{"kubectl.kubernetes.io/last-applied-configuration":"{}","ambient.istio.io/redirection":"enabled",
            "kubernetes.io/config.mirror":"0123456789abcdef0123456789abcdef"},
            "ownerReferences":[{"kind":"Node","name":"n","uid":"x","controller":true}]},
            "spec":{"nodeName":"n","containers":[{"name":"c"}],"serviceAccountName":"web"},
            "status":{"phase":"Running","podIP":"10.0.0.1","podIPs":[{"ip":"10.0.0.1"},{"ip":"fd00::1"}]}}"#;
        let wire = serde_json::from_str::<RawPod>(text).unwrap().convert().unwrap();
        assert_eq!(wire.version, 123);
        assert_eq!(wire.owner.unwrap().kind, "Node");
        let pod = wire.pod;
        assert_eq!(pod.annotations.len(), 2);
        assert_eq!(pod.sandbox_uid(), "0123456789abcdef0123456789abcdef");
        assert_eq!((pod.phase, pod.ips.len()), (Phase::Running, 2));
        assert_eq!(
            (pod.service_account.as_str(), pod.node_name.as_deref()),
            ("web", Some("n"))
        );
    }

    #[test]
    fn lists_may_hold_null_where_nothing_is() {
        let list: List<RawPod> =
            serde_json::from_str(r#"{"metadata":{"resourceVersion":"9","continue":""},"items":null}"#)
                .unwrap();
        assert!(list.items.is_empty());
        assert_eq!(
            (list.metadata.version(), list.metadata.next.as_deref()),
            (9, Some(""))
        );
        let bare: MetadataOnly =
            serde_json::from_str(r#"{"metadata":{"name":"x","labels":null,"annotations":null}}"#).unwrap();
        assert_eq!(bare.namespace().unwrap().name.as_str(), "x");
    }
}
