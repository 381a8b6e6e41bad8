//! Stable error codes: what a person, a dashboard and a test may rely on.
//!
//! A code is part of the interface. Changing or removing one needs a line in CHANGELOG.md.

/// One kind of failure, named by the process that noticed it (`PLG`, `EXE`, `OPN`, `BRK`) or caused it (`ZT`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorCode {
    /// `PLG-ENV`: a CNI environment variable is missing or malformed.
    PluginEnvironment,
    /// `PLG-CONF`: the network configuration on stdin cannot be used.
    PluginConfiguration,
    /// `PLG-NETNS`: the pod's network namespace cannot be opened or entered.
    PluginNetns,
    /// `PLG-CONN`: the executor cannot be reached.
    ExecutorUnreachable,
    /// `PLG-TIME`: the executor did not answer within the plugin's deadline.
    ExecutorTimeout,
    /// `PLG-UNDECIDED`: neither the agent nor the API server could say whether the pod belongs to the mesh.
    Undecided,
    /// `PLG-AUTH`: the API server does not accept the plugin's credentials, or does not let it read the pod.
    ApiCredentials,
    /// `PLG-KUBECONFIG`: the plugin's kubeconfig cannot be used.
    Kubeconfig,
    /// `PLG-POD`: the API server does not have the pod, or has another one of that name.
    PodUnconfirmed,
    /// `PLG-BUG`: the plugin panicked.
    PluginBug,
    /// `EXE-FD`: a descriptor was refused.
    DescriptorRefused,
    /// `EXE-FDLIMIT`: descriptors were lost on the way, by a limit or an LSM.
    DescriptorLimit,
    /// `EXE-RULES`: the kernel refused the rules.
    Rules,
    /// `EXE-ROUTE`: the kernel refused a policy rule or route.
    Routes,
    /// `EXE-PROBE`: the host's probe address set could not be changed.
    ProbeSet,
    /// `EXE-HOST`: the host's network namespace is not reachable (no opener connected).
    HostUnreachable,
    /// `EXE-STATE`: the sandbox table could not be written.
    StateFile,
    /// `EXE-LATE`: the attachment was deleted, replaced or timed out meanwhile.
    TooLate,
    /// `EXE-GONE`: the sandbox or its namespace is not known or no longer exists.
    SandboxGone,
    /// `EXE-INPUT`: a message from a peer is malformed.
    InvalidInput,
    /// `EXE-DRIFT`: a namespace is not as it should be.
    Drift,
    /// `EXE-KERNEL`: a kernel feature is missing.
    KernelFeature,
    /// `OPN-NONE`: no opener is connected.
    OpenerUnavailable,
    /// `OPN-NETNS`: the opener could not find or enter the namespace.
    OpenerNetns,
    /// `BRK-NONE`: no broker is connected to the executor.
    BrokerUnavailable,
    /// `BRK-POD`: the broker does not know the pod (yet).
    PodUnknown,
    /// `BRK-TIME`: the broker did not decide in time.
    BrokerTimeout,
    /// `BRK-STATE`: the broker's own state does not allow the step.
    BrokerState,
    /// `ZT-NONE`: no ready ztunnel connection.
    NoProxy,
    /// `ZT-NACK`: ztunnel refused the pod.
    ProxyNack,
    /// `ZT-TIME`: ztunnel did not answer in time.
    ProxyTimeout,
    /// `ZT-CONN`: the ztunnel connection broke while waiting for the answer.
    ProxyConnection,
    /// `UNKNOWN`: a code that this version does not know.
    Unknown,
}

const TABLE: &[(ErrorCode, &str, &str)] = &[
    (
        ErrorCode::PluginEnvironment,
        "PLG-ENV",
        "the container runtime must set the CNI variables named in the message",
    ),
    (
        ErrorCode::PluginConfiguration,
        "PLG-CONF",
        "correct the sluice entry of the network configuration list",
    ),
    (
        ErrorCode::PluginNetns,
        "PLG-NETNS",
        "the runtime removed the sandbox's network namespace; the kubelet tries again with a new one",
    ),
    (
        ErrorCode::ExecutorUnreachable,
        "PLG-CONN",
        "check that the netns-executor container runs and its socket directory is mounted",
    ),
    (
        ErrorCode::ExecutorTimeout,
        "PLG-TIME",
        "see `sluicectl status`: the node is overloaded or a component hangs",
    ),
    (
        ErrorCode::Undecided,
        "PLG-UNDECIDED",
        "bring the agent or the API server back; the kubelet tries again",
    ),
    (
        ErrorCode::ApiCredentials,
        "PLG-AUTH",
        "bring the agent back, which renews the plugin's token, and check the rights of its ServiceAccount \
         (get pods, get namespaces); the kubelet tries again",
    ),
    (
        ErrorCode::Kubeconfig,
        "PLG-KUBECONFIG",
        "bring the agent back, which writes the plugin's kubeconfig anew; the kubelet tries again",
    ),
    (
        ErrorCode::PodUnconfirmed,
        "PLG-POD",
        "none if the pod was deleted or replaced; otherwise bring the agent back",
    ),
    (ErrorCode::PluginBug, "PLG-BUG", "report it with the message"),
    (
        ErrorCode::DescriptorRefused,
        "EXE-FD",
        "the runtime handed over a namespace that is not this pod's own; see the executor's audit log",
    ),
    (
        ErrorCode::DescriptorLimit,
        "EXE-FDLIMIT",
        "raise the open-files limit or look for denials of the LSM (SELinux, AppArmor)",
    ),
    (
        ErrorCode::Rules,
        "EXE-RULES",
        "run `sluicectl preflight`: a kernel feature is missing or the namespace has no room",
    ),
    (
        ErrorCode::Routes,
        "EXE-ROUTE",
        "run `sluicectl preflight`: policy routing is missing or `lo` is down",
    ),
    (
        ErrorCode::ProbeSet,
        "EXE-PROBE",
        "see `sluicectl status`: the host's rules are being repaired",
    ),
    (
        ErrorCode::HostUnreachable,
        "EXE-HOST",
        "check that the netns-opener container runs",
    ),
    (
        ErrorCode::StateFile,
        "EXE-STATE",
        "check room and permissions of the executor's state directory",
    ),
    (
        ErrorCode::TooLate,
        "EXE-LATE",
        "none: the sandbox was removed or replaced",
    ),
    (
        ErrorCode::SandboxGone,
        "EXE-GONE",
        "none if the pod is going away; otherwise restart the pod",
    ),
    (
        ErrorCode::InvalidInput,
        "EXE-INPUT",
        "components of different versions; finish the upgrade",
    ),
    (
        ErrorCode::Drift,
        "EXE-DRIFT",
        "somebody changed the rules; they are repaired, see the difference in `sluicectl status`",
    ),
    (
        ErrorCode::KernelFeature,
        "EXE-KERNEL",
        "load the module or enable the kernel option named in the message",
    ),
    (
        ErrorCode::OpenerUnavailable,
        "OPN-NONE",
        "check that the netns-opener container runs, or restart the pod so that the plugin hands it over",
    ),
    (ErrorCode::OpenerNetns, "OPN-NETNS", "restart the pod"),
    (
        ErrorCode::BrokerUnavailable,
        "BRK-NONE",
        "check that the ambient-broker container runs",
    ),
    (
        ErrorCode::PodUnknown,
        "BRK-POD",
        "check that the pod exists and that the broker's source is in sync",
    ),
    (
        ErrorCode::BrokerTimeout,
        "BRK-TIME",
        "see `sluicectl status`: what the pod waits for is listed there",
    ),
    (ErrorCode::BrokerState, "BRK-STATE", "see `sluicectl explain`"),
    (
        ErrorCode::NoProxy,
        "ZT-NONE",
        "check that ztunnel runs on the node and mounts the ZDS socket's directory",
    ),
    (
        ErrorCode::ProxyNack,
        "ZT-NACK",
        "ztunnel says why; commonly a port is taken or IPv6 is disabled in the pod",
    ),
    (
        ErrorCode::ProxyTimeout,
        "ZT-TIME",
        "ztunnel hangs or is overloaded; look at its log",
    ),
    (
        ErrorCode::ProxyConnection,
        "ZT-CONN",
        "ztunnel restarted; the kubelet tries again",
    ),
    (
        ErrorCode::Unknown,
        "UNKNOWN",
        "components of different versions; finish the upgrade",
    ),
];

impl ErrorCode {
    /// The stable text form.
    pub fn as_str(self) -> &'static str {
        TABLE
            .iter()
            .find(|(code, ..)| *code == self)
            .map_or("UNKNOWN", |(_, text, _)| text)
    }

    /// What a person can do about it.
    pub fn fix(self) -> &'static str {
        TABLE
            .iter()
            .find(|(code, ..)| *code == self)
            .map_or("", |(.., fix)| fix)
    }

    /// Reads the text form; an unknown code becomes [`ErrorCode::Unknown`].
    pub fn parse(text: &str) -> Self {
        TABLE
            .iter()
            .find(|(_, known, _)| *known == text)
            .map_or(Self::Unknown, |(code, ..)| *code)
    }

    /// Every code with its text form and fix, for documentation.
    pub fn all() -> impl Iterator<Item = (&'static str, &'static str)> {
        TABLE.iter().map(|(_, text, fix)| (*text, *fix))
    }
}

impl std::fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_its_own_text_and_a_fix() {
        let mut texts: Vec<_> = ErrorCode::all().map(|(text, _)| text).collect();
        texts.sort_unstable();
        texts.dedup();
        assert_eq!(texts.len(), TABLE.len());
        for (text, fix) in ErrorCode::all() {
            assert!(!fix.is_empty(), "{text}");
            assert_eq!(ErrorCode::parse(text).as_str(), text);
        }
    }
}
