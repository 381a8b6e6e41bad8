//! The broker's answers in the form that people and programs see: states by name, absent things absent.

use serde::Serialize;
use sluice_proto::pb::types::{Failure, NetnsIdentity};
use sluice_proto::pb::workload::{DescribeResponse, NodeResponse, Pod, PodState, SelectionStep, StageTiming};

/// State of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    Out,
    Pending,
    Enrolled,
    Broken,
    Draining,
    Unknown,
}

impl State {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Out => "out",
            Self::Pending => "pending",
            Self::Enrolled => "enrolled",
            Self::Broken => "broken",
            Self::Draining => "draining",
            Self::Unknown => "unknown",
        }
    }
}

/// One pod.
#[derive(Debug, Serialize)]
pub(crate) struct PodView {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
    pub(crate) state: State,
    /// Which label, annotation or rule put the pod in or out.
    pub(crate) verdict: String,
    /// Annotations whose values are not taken.
    pub(crate) ignored_annotations: Option<String>,
    pub(crate) reason: Option<String>,
    pub(crate) last_error: Option<String>,
    pub(crate) netns: Option<NetnsIdentity>,
    pub(crate) addresses: Vec<String>,
    pub(crate) timings: Vec<StageTiming>,
    pub(crate) handoff: Option<Handoff>,
    pub(crate) retries: u32,
    pub(crate) rules_version: Option<String>,
}

/// Who acknowledged the pod's namespace, and when.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Handoff {
    pub(crate) connection: u64,
    pub(crate) acked_unix_ms: u64,
}

fn given(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

impl From<Pod> for PodView {
    fn from(pod: Pod) -> Self {
        let state = match pod.state() {
            PodState::Unspecified => State::Unknown,
            PodState::Out => State::Out,
            PodState::Pending => State::Pending,
            PodState::Enrolled => State::Enrolled,
            PodState::Broken => State::Broken,
            PodState::Draining => State::Draining,
        };
        let name = pod.pod.unwrap_or_default();
        Self {
            namespace: name.namespace,
            name: name.name,
            uid: name.uid,
            state,
            verdict: pod.verdict,
            ignored_annotations: given(pod.ignored_annotations),
            reason: given(pod.reason),
            last_error: given(pod.last_error),
            netns: pod.netns,
            addresses: pod.addresses,
            timings: pod.timings,
            handoff: (pod.acked_unix_ms != 0).then_some(Handoff {
                connection: pod.zds_connection,
                acked_unix_ms: pod.acked_unix_ms,
            }),
            retries: pod.retries,
            rules_version: given(pod.rules_version),
        }
    }
}

impl PodView {
    pub(crate) fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Whether the pod's selection puts it in the mesh, whatever has become of it.
    pub(crate) fn is_selected(&self) -> bool {
        !matches!(self.state, State::Out | State::Draining | State::Unknown)
    }
}

/// One pod in full.
#[derive(Debug, Serialize)]
pub(crate) struct PodDetails {
    #[serde(flatten)]
    pub(crate) pod: PodView,
    pub(crate) selection: Vec<SelectionStep>,
    /// What is not in the namespace as it should be.
    pub(crate) differences: Vec<String>,
    pub(crate) rules: Vec<String>,
    pub(crate) probe_addresses: Vec<String>,
    /// Why the namespace could not be read back.
    pub(crate) read_back_failed: Option<Failure>,
    /// The pod still has the rules of another executor.
    pub(crate) other_rules: Option<OtherRules>,
}

/// Versions of the rule model that differ.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct OtherRules {
    pub(crate) pod: u32,
    pub(crate) executor: u32,
}

impl From<DescribeResponse> for PodDetails {
    fn from(answer: DescribeResponse) -> Self {
        Self {
            pod: answer.pod.unwrap_or_default().into(),
            selection: answer.selection,
            differences: answer.differences,
            rules: answer.rules,
            probe_addresses: answer.probe_addresses,
            read_back_failed: answer.failed,
            other_rules: (answer.rule_schema != answer.executor_rule_schema).then_some(OtherRules {
                pod: answer.rule_schema,
                executor: answer.executor_rule_schema,
            }),
        }
    }
}

impl PodDetails {
    /// The pod is not as it should be.
    pub(crate) fn is_broken(&self) -> bool {
        self.pod.state == State::Broken || !self.differences.is_empty() || self.read_back_failed.is_some()
    }
}

/// The node and its pods.
#[derive(Debug, Serialize)]
pub(crate) struct NodeView {
    pub(crate) node: NodeResponse,
    pub(crate) pods: Vec<PodView>,
}

impl NodeView {
    /// The node is not as it should be.
    pub(crate) fn is_broken(&self) -> bool {
        let executor_broken = self
            .node
            .executor
            .as_ref()
            .is_none_or(|executor| !executor.host_reachable || !executor.host_differences.is_empty());
        !self.node.ready || self.node.pods_broken > 0 || executor_broken
    }
}
