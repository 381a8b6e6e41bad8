//! From afar: kubectl, which knows how to reach the cluster and as whom, finds the agent's pod on a node and runs this
//! program's twin in it. So the operator needs no right on the node, only `pods/exec` in the agent's namespace.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use serde::Deserialize;

use crate::cli::{Cli, Output, PodArgument, Question};

/// This program in the agent's image.
pub(crate) const SLUICECTL: &str = "/opt/sluice/bin/sluicectl";

/// The container whose sockets answer questions.
const BROKER: &str = "ambient-broker";

/// Labels of the agent's pods, as the chart sets them.
pub(crate) const SELECTOR: &str = "app.kubernetes.io/name=sluice,app.kubernetes.io/component=node";

/// The agent could not be reached through kubectl.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KubectlError {
    #[error("cannot execute kubectl")]
    Start(#[source] io::Error),
    #[error("kubectl {what} failed: {message}")]
    Failed { what: String, message: String },
    #[error("the answer of kubectl cannot be read")]
    Answer(#[source] serde_json::Error),
    #[error("no pod of the agent is on node {node}")]
    NoAgent { node: String },
    #[error("pod {pod} has no node yet")]
    NoNode { pod: String },
    #[error("which node?")]
    WhichNode,
}

impl KubectlError {
    pub(crate) fn advice(&self) -> Option<&'static str> {
        match self {
            Self::Start(error) if error.kind() == io::ErrorKind::NotFound => {
                Some("--node needs kubectl in the PATH.")
            }
            Self::NoAgent { .. } => Some(
                "See `kubectl get pods --all-namespaces --selector app.kubernetes.io/name=sluice --output wide`; the node may be \
                 tainted or excluded.",
            ),
            Self::NoNode { .. } => Some("It is not scheduled; see `kubectl describe pod`."),
            Self::WhichNode => Some("Name one with --node NODE (see `kubectl get nodes`)."),
            _ => None,
        }
    }
}

/// How to call kubectl.
#[derive(Debug)]
pub(crate) struct Kubectl {
    flags: Vec<String>,
}

/// The agent of a node.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Agent {
    pub(crate) node: String,
    pub(crate) namespace: String,
    pub(crate) pod: String,
    /// Those that run to their end before the others start, first.
    pub(crate) containers: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct PodList {
    items: Vec<Pod>,
}

#[derive(Debug, Deserialize)]
struct Pod {
    metadata: Metadata,
    #[serde(default)]
    spec: Spec,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    name: String,
    namespace: String,
    deletion_timestamp: Option<String>,
    creation_timestamp: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    node_name: Option<String>,
    #[serde(default)]
    init_containers: Vec<Container>,
    #[serde(default)]
    containers: Vec<Container>,
}

#[derive(Debug, Deserialize)]
struct Container {
    name: String,
}

impl Kubectl {
    pub(crate) fn new(cli: &Cli) -> Self {
        let mut flags = Vec::new();
        for (name, value) in [("--context", &cli.context), ("--kubeconfig", &cli.kubeconfig)] {
            if let Some(value) = value {
                flags.push(format!("{name}={value}"));
            }
        }
        Self { flags }
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "the operator's command runs the operator's kubectl"
    )]
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("kubectl");
        command.args(&self.flags).args(arguments);
        command
    }

    /// What kubectl prints. An API server that hangs is given up.
    pub(crate) fn output(&self, arguments: &[&str]) -> Result<Vec<u8>, KubectlError> {
        let arguments_in_time = [&["--request-timeout=60s"], arguments].concat();
        let output = self
            .command(&arguments_in_time)
            .output()
            .map_err(KubectlError::Start)?;
        if output.status.success() {
            return Ok(output.stdout);
        }
        Err(KubectlError::Failed {
            what: arguments.iter().take(2).copied().collect::<Vec<_>>().join(" "),
            message: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        })
    }

    /// The node's agent; of several, while one replaces the other, the one that stays.
    pub(crate) fn agent(&self, node: &str) -> Result<Agent, KubectlError> {
        let field = format!("spec.nodeName={node}");
        let arguments = [
            "get",
            "pods",
            "--all-namespaces",
            "--selector",
            SELECTOR,
            "--field-selector",
            &field,
            "--output=json",
        ];
        choose(&self.output(&arguments)?, node)
    }

    /// Where a pod is.
    fn node_of(&self, namespace: &str, name: &str) -> Result<String, KubectlError> {
        let json = self.output(&["get", "pod", "--namespace", namespace, name, "--output=json"])?;
        let pod: Pod = serde_json::from_slice(&json).map_err(KubectlError::Answer)?;
        pod.spec
            .node_name
            .filter(|node| !node.is_empty())
            .ok_or_else(|| KubectlError::NoNode {
                pod: format!("{namespace}/{name}"),
            })
    }

    /// What a command in one of the agent's containers prints.
    pub(crate) fn exec_output(
        &self,
        agent: &Agent,
        container: &str,
        command: &[&str],
    ) -> Result<Vec<u8>, KubectlError> {
        self.output(&exec_arguments(agent, container, command))
    }

    /// Becomes kubectl, and through it the command in the agent's container: output, signals and exit status are its own.
    /// Comes back only with an error.
    pub(crate) fn become_exec(&self, agent: &Agent, command: &[&str]) -> KubectlError {
        KubectlError::Start(self.command(&exec_arguments(agent, BROKER, command)).exec())
    }
}

fn exec_arguments<'a>(agent: &'a Agent, container: &'a str, command: &[&'a str]) -> Vec<&'a str> {
    let fixed = [
        "exec",
        "--namespace",
        &agent.namespace,
        &agent.pod,
        "--container",
        container,
        "--",
    ];
    [&fixed, command].concat()
}

fn choose(json: &[u8], node: &str) -> Result<Agent, KubectlError> {
    let list: PodList = serde_json::from_slice(json).map_err(KubectlError::Answer)?;
    let youngest = list
        .items
        .into_iter()
        .filter(|pod| {
            pod.spec
                .containers
                .iter()
                .any(|container| container.name == BROKER)
        })
        // RFC 3339 in UTC: the order of the text is the order of time.
        .max_by_key(|pod| {
            (
                pod.metadata.deletion_timestamp.is_none(),
                pod.metadata.creation_timestamp.clone(),
            )
        });
    let pod = youngest.ok_or_else(|| KubectlError::NoAgent {
        node: node.to_owned(),
    })?;
    Ok(Agent {
        node: node.to_owned(),
        namespace: pod.metadata.namespace,
        pod: pod.metadata.name,
        containers: pod
            .spec
            .init_containers
            .into_iter()
            .chain(pod.spec.containers)
            .map(|container| container.name)
            .collect(),
    })
}

/// The node a question is about when none was named: the one of the pod that it names.
pub(crate) fn node_of_question(kubectl: &Kubectl, question: &Question) -> Result<String, KubectlError> {
    let (pod, default): (&PodArgument, &str) = match question {
        Question::Status { pod: Some(pod) } => (pod, "default"),
        Question::Explain { pod, namespace } => (pod, namespace),
        _ => return Err(KubectlError::WhichNode),
    };
    kubectl.node_of(pod.namespace.as_deref().unwrap_or(default), &pod.name)
}

/// The same question for the twin.
pub(crate) fn arguments(cli: &Cli) -> Vec<String> {
    let mut arguments = vec![SLUICECTL.to_owned()];
    if cli.output == Output::Json {
        arguments.push("--output=json".to_owned());
    }
    let full = |pod: &PodArgument, default: &str| {
        format!("{}/{}", pod.namespace.as_deref().unwrap_or(default), pod.name)
    };
    arguments.extend(match &cli.question {
        Question::Status { pod: None } => vec!["status".to_owned()],
        Question::Status { pod: Some(pod) } => {
            vec!["status".to_owned(), format!("--pod={}", full(pod, "default"))]
        }
        Question::Explain { pod, namespace } => vec!["explain".to_owned(), full(pod, namespace)],
        Question::Watch => vec!["watch".to_owned()],
        Question::Preflight => vec!["preflight".to_owned()],
        // Answered here.
        Question::BugReport(_) | Question::Completion { .. } => Vec::new(),
    });
    arguments
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(name: &str, created: &str, deleted: Option<&str>) -> Value {
        json!({ "metadata": { "name": name, "namespace": "sluice-system", "creationTimestamp": created, "deletionTimestamp": deleted },
            "spec": { "nodeName": "n1", "initContainers": [{ "name": "first" }],
                "containers": [{ "name": "installer" }, { "name": "ambient-broker" }] } })
    }

    fn chosen(items: &[Value]) -> Result<Agent, KubectlError> {
        choose(json!({ "items": items }).to_string().as_bytes(), "n1")
    }

    #[test]
    fn of_two_agents_the_one_that_stays_is_asked() {
        let old = pod("old", "2026-01-01T00:00:00Z", None);
        let new = pod("new", "2026-01-02T00:00:00Z", None);
        let leaving = pod("leaving", "2026-01-03T00:00:00Z", Some("2026-01-03T00:00:01Z"));
        let agent = chosen(&[leaving.clone(), new, old]).unwrap();
        assert_eq!((&*agent.pod, &*agent.namespace), ("new", "sluice-system"));
        assert_eq!(agent.containers, ["first", "installer", "ambient-broker"]);
        assert_eq!(chosen(&[leaving]).unwrap().pod, "leaving");
    }

    #[test]
    fn a_node_without_agent_is_an_error() {
        let mut other = pod("webhook", "2026-01-01T00:00:00Z", None);
        other["spec"]["containers"] = json!([{ "name": "webhook" }]);
        for items in [vec![], vec![other]] {
            assert!(matches!(chosen(&items), Err(KubectlError::NoAgent { .. })));
        }
    }
}
