//! What the broker's token may write, asked of a real API server: with RBAC and admission policy as the chart renders them.

use std::io::Write;

use serde_json::{Value, json};
use tempfile::NamedTempFile;

use crate::helm::NAMESPACE;
use crate::release::{installed, kubectl, kubectl_refused};

const STATUS: &str = r#"{"metadata":{"annotations":{"ambient.istio.io/redirection":"enabled"}}}"#;

/// A kubeconfig that acts as the broker of this node.
fn broker_of(node: &str) -> NamedTempFile {
    let mut config: Value = serde_json::from_str(&kubectl(&[
        "config", "view", "--raw", "--minify", "--output", "json",
    ]))
    .unwrap();
    let user = &mut config["users"][0]["user"];
    // As the API server sees a token of that account that is bound to a pod.
    user["as"] = json!(format!("system:serviceaccount:{NAMESPACE}:sluice-node"));
    user["as-groups"] = json!(["system:serviceaccounts", "system:authenticated", Reader::NAME]);
    user["as-user-extra"] = json!({"authentication.kubernetes.io/node-name": [node]});
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(config.to_string().as_bytes()).unwrap();
    file
}

/// Lets a group read what it patches: `kubectl patch` does so first, the broker does not. Gone with this value.
struct Reader;

impl Reader {
    const NAME: &str = "sluice-test-reader";

    fn new() -> Self {
        kubectl(&[
            "create",
            "clusterrole",
            Self::NAME,
            "--verb=get",
            "--resource=pods/status",
        ]);
        let (role, group) = (
            format!("--clusterrole={}", Self::NAME),
            format!("--group={}", Self::NAME),
        );
        kubectl(&["create", "clusterrolebinding", Self::NAME, &role, &group]);
        Self
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        kubectl(&["delete", "clusterrole,clusterrolebinding", Self::NAME]);
    }
}

fn node() -> String {
    kubectl(&["get", "nodes", "--output", "jsonpath={.items[0].metadata.name}"])
}

/// A pod that is assigned to a node and never started there.
struct Pod(&'static str);

impl Pod {
    fn on(name: &'static str, node: &str) -> Self {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            // Nothing tolerates being scheduled here; the name of a node alone is what the policy looks at.
            "spec": {
                "nodeName": node, "terminationGracePeriodSeconds": 0,
                "containers": [{"name": "c", "image": "localhost/none:none", "imagePullPolicy": "Never"}],
            },
        });
        let mut file = NamedTempFile::new().unwrap();
        file.write_all(pod.to_string().as_bytes()).unwrap();
        kubectl(&["apply", "--filename", file.path().to_str().unwrap()]);
        Self(name)
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        kubectl(&[
            "delete",
            "pod",
            self.0,
            "--force",
            "--grace-period=0",
            "--wait=false",
        ]);
    }
}

#[test]
fn the_broker_writes_its_annotation_on_pods_of_its_node_and_nothing_else() {
    installed();
    let _reader = Reader::new();
    let node = node();
    let file = broker_of(&node);
    let broker = file.path().to_str().unwrap();
    let here = Pod::on("admission-here", &node);
    let elsewhere = Pod::on("admission-elsewhere", "another-node");
    let patch = |pod: &Pod, body: &str| -> Vec<String> {
        let words = [
            "--kubeconfig",
            broker,
            "patch",
            "pod",
            pod.0,
            "--subresource=status",
            "--type=merge",
            "--patch",
            body,
        ];
        words.map(str::to_owned).to_vec()
    };
    let done = |args: Vec<String>| kubectl(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let refused = |args: Vec<String>| kubectl_refused(&args.iter().map(String::as_str).collect::<Vec<_>>());

    // Of the answer, since the broker that runs there takes back what it did not write.
    let annotation = r"--output=jsonpath={.metadata.annotations.ambient\.istio\.io/redirection}";
    let mut set = patch(&here, STATUS);
    set.push(annotation.to_owned());
    assert_eq!(done(set), "enabled");
    done(patch(
        &here,
        r#"{"metadata":{"annotations":{"ambient.istio.io/redirection":null}}}"#,
    ));

    let message = refused(patch(&elsewhere, STATUS));
    assert!(message.contains("pods of its own node only"), "{message}");
    for body in [
        r#"{"metadata":{"annotations":{"other":"x"}}}"#,
        r#"{"metadata":{"labels":{"other":"x"}}}"#,
        r#"{"metadata":{"finalizers":["example.com/x"]}}"#,
        r#"{"status":{"phase":"Failed"}}"#,
    ] {
        let message = refused(patch(&here, body));
        assert!(
            message.contains("ambient.istio.io/redirection only"),
            "{body}: {message}"
        );
    }
}

#[test]
fn the_accounts_cannot_read_secrets_or_change_pods() {
    installed();
    for account in ["sluice-node", "sluice-plugin"] {
        let user = format!("--as=system:serviceaccount:{NAMESPACE}:{account}");
        for (verb, resource) in [
            ("get", "secrets"),
            ("list", "secrets"),
            ("update", "pods"),
            ("patch", "pods"),
            ("delete", "pods"),
            ("create", "pods"),
            ("create", "pods/exec"),
            ("get", "configmaps"),
            ("patch", "nodes"),
            ("patch", "daemonsets.apps"),
            ("create", "serviceaccounts/token"),
        ] {
            let answer = kubectl_refused(&["auth", "can-i", verb, resource, "--all-namespaces", &user]);
            assert!(!answer.contains("error"), "{account} {verb} {resource}: {answer}");
        }
    }
    let plugin = format!("--as=system:serviceaccount:{NAMESPACE}:sluice-plugin");
    kubectl_refused(&["auth", "can-i", "list", "pods", "--all-namespaces", &plugin]);
    kubectl(&["auth", "can-i", "get", "pods", "--all-namespaces", &plugin]);
}
