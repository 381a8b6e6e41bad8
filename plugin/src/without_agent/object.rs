//! What is read of a pod and of a namespace, and the decision by them. Pure.

use serde::Deserialize;
use sluice_proto::code::ErrorCode;
use sluice_proto::id::PodRef;
use sluice_selection::{Labels, NamespaceView, PodView, SelectionConfig, sandbox_uid, select};

use super::Decision;

/// The objects decide nothing.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ObjectError {
    #[error("the {what} in the API server's answer is malformed (line {line}, column {column})")]
    Malformed {
        what: &'static str,
        line: usize,
        column: usize,
    },
    #[error("the API server's pod of that name has UID {found:?}, the sandbox is for {expected:?}")]
    OtherUid { expected: String, found: String },
}

impl ObjectError {
    pub(crate) fn error_code(&self) -> ErrorCode {
        match self {
            Self::Malformed { .. } => ErrorCode::Undecided,
            Self::OtherUid { .. } => ErrorCode::PodUnconfirmed,
        }
    }
}

/// Pod or namespace. `spec` is there only if the server does not know how to send metadata alone.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Object {
    metadata: Metadata,
    #[serde(default)]
    spec: Option<Spec>,
}

#[derive(Debug, Default, Deserialize)]
struct Metadata {
    #[serde(default)]
    uid: String,
    #[serde(default)]
    labels: Option<Labels>,
    #[serde(default)]
    annotations: Option<Labels>,
}

#[derive(Debug, Default, Deserialize)]
struct Spec {
    #[serde(default, rename = "hostNetwork")]
    host_network: bool,
}

/// Reads an object.
pub(crate) fn parse(what: &'static str, json: &[u8]) -> Result<Object, ObjectError> {
    serde_json::from_slice(json).map_err(|error| ObjectError::Malformed {
        what,
        line: error.line(),
        column: error.column(),
    })
}

/// Decides as the broker would with these objects in its cache.
pub(crate) fn decide(
    selection: &SelectionConfig,
    asked: &PodRef,
    pod: &Object,
    namespace: &Object,
) -> Result<Decision, ObjectError> {
    let none = Labels::new();
    let annotations = pod.metadata.annotations.as_ref().unwrap_or(&none);
    // A static pod is known to the runtime by its manifest's hash, to the API server by its mirror.
    let uid = sandbox_uid(&pod.metadata.uid, annotations);
    if uid != asked.uid.as_str() {
        return Err(ObjectError::OtherUid {
            expected: asked.uid.to_string(),
            found: uid.chars().take(64).collect(),
        });
    }
    let view = PodView {
        namespace: asked.namespace.as_str(),
        name: asked.name.as_str(),
        labels: pod.metadata.labels.as_ref().unwrap_or(&none),
        annotations,
        host_network: pod.spec.as_ref().is_some_and(|spec| spec.host_network),
        phase: None,
    };
    let labels = namespace.metadata.labels.as_ref().unwrap_or(&none);
    let verdict = select(selection, &view, Some(NamespaceView { labels }));
    let reason = verdict.reason.to_string();
    Ok(if verdict.is_in() {
        Decision::InMesh(reason)
    } else {
        Decision::Outside(reason)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    const UID: &str = "11111111-2222-3333-4444-555555555555";
    const HASH: &str = "0123456789abcdef0123456789abcdef";

    fn decide_as(uid: &str, pod: Value, namespace: Value) -> Result<Decision, ObjectError> {
        let asked = PodRef {
            namespace: "team-a".parse().unwrap(),
            name: "web-0".parse().unwrap(),
            uid: uid.parse().unwrap(),
        };
        let object =
            |metadata: Value| parse("object", json!({ "metadata": metadata }).to_string().as_bytes());
        decide(
            &SelectionConfig::default(),
            &asked,
            &object(pod)?,
            &object(namespace)?,
        )
    }

    fn is_in(pod: Value, namespace: Value) -> bool {
        matches!(decide_as(UID, pod, namespace), Ok(Decision::InMesh(_)))
    }

    #[test]
    fn labels_of_pod_and_namespace_decide() {
        let mode = |value: &str| json!({ "istio.io/dataplane-mode": value });
        let pod = |labels: Value| json!({ "uid": UID, "labels": labels });
        let namespace = |labels: Value| json!({ "labels": labels });
        assert!(!is_in(pod(json!(null)), namespace(json!(null))));
        assert!(is_in(pod(json!({})), namespace(mode("ambient"))));
        assert!(is_in(pod(mode("ambient")), namespace(json!({}))));
        assert!(!is_in(pod(mode("none")), namespace(mode("ambient"))));
        let sidecar = json!({ "uid": UID, "annotations": { "sidecar.istio.io/status": "" } });
        assert!(!is_in(sidecar, namespace(mode("ambient"))));
    }

    #[test]
    fn a_pod_of_another_uid_decides_nothing() {
        let error = decide_as(UID, json!({ "uid": "other" }), json!({})).unwrap_err();
        assert_eq!(error.error_code(), ErrorCode::PodUnconfirmed);
        assert!(decide_as(UID, json!({}), json!({})).is_err());
    }

    #[test]
    fn a_static_pod_is_known_by_its_mirrors_hash() {
        let mirror = json!({ "uid": UID, "annotations": { "kubernetes.io/config.mirror": HASH } });
        assert!(decide_as(HASH, mirror.clone(), json!({})).is_ok());
        assert!(decide_as(UID, mirror, json!({})).is_err());
        assert!(decide_as(HASH, json!({ "uid": UID }), json!({})).is_err());
    }

    #[test]
    fn what_is_no_object_is_an_error_that_shows_nothing_of_it() {
        for text in [
            "",
            "{}",
            "[]",
            r#"{"metadata":"secret"}"#,
            r#"{"metadata":{"labels":{"a":1}}}"#,
        ] {
            let error = parse("pod", text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains("pod") && !error.contains("secret"), "{error}");
        }
    }

    proptest! {
        /// A pod passes only with its own UID, whatever else the object says.
        #[test]
        fn nothing_but_the_pods_own_uid_decides(uid in "[0-9a-f-]{0,36}", mirror in "[0-9a-f]{0,32}") {
            let pod = json!({ "uid": uid, "annotations": { "kubernetes.io/config.mirror": mirror } });
            let known = if mirror.len() == 32 { &mirror } else { &uid };
            prop_assert_eq!(decide_as(UID, pod, json!({})).is_ok(), known == UID);
        }

        #[test]
        fn no_bytes_make_a_panic(bytes in any::<Vec<u8>>()) {
            let _ = parse("pod", &bytes);
        }
    }
}
