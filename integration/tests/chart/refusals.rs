//! Values that are misspelt or dangerous are refused, by a message that names them.

use crate::helm::{Release, refusal};

/// Each is refused, and the message contains these words.
const REFUSED: &[(&[&str], &[&str])] = &[
    // Misspelt.
    (&["profil=default"], &["profil", "not allowed"]),
    (
        &["executor.resource.limits.memory=1Gi"],
        &["/executor", "resource", "not allowed"],
    ),
    (
        &["executor.resources.limit.memory=1Gi"],
        &["/executor/resources", "limit", "not allowed"],
    ),
    (
        &["selection.excludeNamespaces={a}"],
        &["/selection", "excludeNamespaces", "not allowed"],
    ),
    (&["cni.cniBinDir=/x"], &["/cni", "cniBinDir", "not allowed"]),
    (&["profile=enrolonadd"], &["/profile", "default", "enrolOnAdd"]),
    (&["platform=GKE"], &["/platform", "gke"]),
    (&["cni.mode=chain"], &["/cni/mode", "owned", "chained"]),
    (&["image.pullPolicy=always"], &["/image/pullPolicy", "Always"]),
    (&["broker.drainSeconds=1m"], &["/broker/drainSeconds", "integer"]),
    (&["executor.logLevel=very loud"], &["/executor/logLevel"]),
    (
        &["executor.resources.limits.memory=1 GB"],
        &["/executor/resources/limits/memory"],
    ),
    (
        &["selection.excludedNamespaces={Kube_System}"],
        &["/selection/excludedNamespaces/0"],
    ),
    // Dangerous.
    (
        &["executor.privileged=true"],
        &["/executor", "privileged", "not allowed"],
    ),
    (&["hostNetwork=true"], &["hostNetwork", "not allowed"]),
    (&["hostPID=true"], &["hostPID", "not allowed"]),
    (
        &["executor.capabilities={NET_ADMIN,SYS_ADMIN}"],
        &["/executor/capabilities/1", "NET_ADMIN"],
    ),
    (
        &["broker.capabilities={NET_ADMIN}"],
        &["broker.capabilities", "NET_ADMIN", "without capabilities"],
    ),
    (
        &["installer.capabilities={SYS_ADMIN}"],
        &["/installer/capabilities/0", "DAC_OVERRIDE"],
    ),
    (
        &["opener.capabilities={SYS_ADMIN,SYS_PTRACE,NET_ADMIN}"],
        &["/opener/capabilities/2"],
    ),
    (&["executor.capabilities={ALL}"], &["/executor/capabilities/0"]),
    (
        &["executor.seccompProfile.type=Unconfined"],
        &["/executor/seccompProfile/type", "RuntimeDefault"],
    ),
    (
        &["updateStrategy.maxSurge=0"],
        &["updateStrategy", "maxSurge is 0", "maxUnavailable 0"],
    ),
    (
        &["updateStrategy.maxUnavailable=1"],
        &["updateStrategy", "maxSurge is 1", "maxUnavailable 1"],
    ),
    (
        &["updateStrategy.maxUnavailable=-1"],
        &["/updateStrategy/maxUnavailable"],
    ),
    (&["cni.binDir=/"], &["/cni/binDir"]),
    (&["cni.binDir=opt/cni/bin"], &["/cni/binDir"]),
    (&["cni.confDir=/etc/cni/../../root"], &["/cni/confDir"]),
    (&["ztunnel.socketDir=/etc"], &["/ztunnel/socketDir"]),
    (&["takeover.socketDir=/var/lib"], &["/takeover/socketDir"]),
    (&["cni.ownedFileName=05-other.conflist"], &["/cni/ownedFileName"]),
    (&["broker.port=80"], &["/broker/port", "minimum"]),
    (
        &["broker.readyAfterSeconds=0"],
        &["/broker/readyAfterSeconds", "minimum"],
    ),
    (
        &["terminationGracePeriodSeconds=1"],
        &["/terminationGracePeriodSeconds", "10"],
    ),
    (&["image.digest=latest"], &["/image/digest"]),
    // What only the templates can see.
    (
        &["executor.capabilities=null"],
        &["executor.capabilities", "NET_ADMIN is missing"],
    ),
    (
        &["opener.capabilities={SYS_ADMIN}"],
        &["opener.capabilities: SYS_PTRACE is missing", "profile=enrolOnAdd"],
    ),
    (
        &["cni.binDir=/x", "cni.confDir=/x"],
        &["cni.binDir and cni.confDir are both /x"],
    ),
    (
        &["cni.binMount=/var/lib/rancher"],
        &["cni.binMount: cni.binDir, which is /opt/cni/bin, is not below /var/lib/rancher"],
    ),
    (
        &["cni.mode=chained", "cni.ownedFileName=00-sluice.conflist"],
        &["cni.ownedFileName", "cni.mode=owned"],
    ),
    (
        &["platform=openshift", "cni.ownedFileName=00-sluice.conflist"],
        &["cni.ownedFileName", "cni.mode is standAlone", "cni.mode=owned"],
    ),
    (
        &["cni.mode=standAlone", "cni.primaryFileName=10-net.conflist"],
        &["cni.primaryFileName", "cni.mode is standAlone"],
    ),
];

#[test]
fn misspelt_and_dangerous_values_are_refused_by_name() {
    for (set, words) in REFUSED {
        let message = refusal(set);
        for word in *words {
            assert!(message.contains(word), "{set:?}: no {word:?} in {message}");
        }
    }
}

#[test]
fn without_the_opener_its_capabilities_are_nobodys_business() {
    Release::render(&["profile=enrolOnAdd", "opener.capabilities=null"]);
}
