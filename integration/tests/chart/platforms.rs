//! Each profile on each platform: the right directories, and the same containers.

use crate::helm::{HostPath, Release};

/// platform, plugins, configurations, namespaces: as its documentation names them.
const PLATFORMS: [(&str, &str, &str, &str); 9] = [
    ("", "/opt/cni/bin", "/etc/cni/net.d", "/var/run/netns"),
    ("gke", "/home/kubernetes/bin", "/etc/cni/net.d", "/var/run/netns"),
    (
        "openshift",
        "/var/lib/cni/bin",
        "/etc/cni/multus/net.d",
        "/var/run/netns",
    ),
    (
        "k3s",
        "/var/lib/rancher/k3s/data/cni",
        "/var/lib/rancher/k3s/agent/etc/cni/net.d",
        "/var/run/netns",
    ),
    (
        "k3d",
        "/bin",
        "/var/lib/rancher/k3s/agent/etc/cni/net.d",
        "/var/run/netns",
    ),
    (
        "microk8s",
        "/var/snap/microk8s/current/opt/cni/bin",
        "/var/snap/microk8s/current/args/cni-network",
        "/var/run/netns",
    ),
    ("talos", "/opt/cni/bin", "/etc/cni/net.d", "/var/run/netns"),
    (
        "minikube",
        "/opt/cni/bin",
        "/etc/cni/net.d",
        "/var/run/docker/netns",
    ),
    ("kind", "/opt/cni/bin", "/etc/cni/net.d", "/var/run/netns"),
];

fn at<'a>(paths: &'a [HostPath], mount: &str) -> &'a HostPath {
    let found = paths.iter().find(|path| path.at == mount);
    found.unwrap_or_else(|| panic!("nothing at {mount}: {paths:?}"))
}

#[test]
fn every_profile_finds_every_platforms_directories() {
    for (platform, binaries, configurations, namespaces) in PLATFORMS {
        for profile in ["default", "enrolOnAdd"] {
            let release = Release::render(&[&format!("platform={platform}"), &format!("profile={profile}")]);
            let what = format!("{platform} {profile}");
            let installer = release.host_paths("installer");
            assert_eq!(at(&installer, "/host/opt/cni/bin").host, binaries, "{what}");
            assert_eq!(
                at(&installer, "/host/etc/cni/net.d").host,
                configurations,
                "{what}"
            );
            // For messages, which have to name the host's paths.
            assert_eq!(
                release.flag("installer", "--host-cni-bin-dir").unwrap(),
                binaries,
                "{what}"
            );
            assert_eq!(
                release.flag("installer", "--host-cni-net-dir").unwrap(),
                configurations,
                "{what}"
            );
            if profile == "default" {
                let opener = release.host_paths("netns-opener");
                // A path that the runtime reports is looked up as it is.
                let mount = at(&opener, namespaces);
                assert_eq!(mount.host, namespaces, "{what}");
                assert!(mount.read_only, "{what}");
                assert_eq!(mount.propagation.as_deref(), Some("HostToContainer"), "{what}");
            }
        }
    }
}

#[test]
fn a_directory_that_is_named_wins_over_the_platform() {
    let release = Release::render(&[
        "platform=k3s",
        "cni.binDir=/srv/bin",
        "cni.netnsDir=/run/docker/netns",
    ]);
    let installer = release.host_paths("installer");
    assert_eq!(at(&installer, "/host/opt/cni/bin").host, "/srv/bin");
    assert_eq!(
        at(&installer, "/host/etc/cni/net.d").host,
        "/var/lib/rancher/k3s/agent/etc/cni/net.d"
    );
    // Both names of the directory.
    let opener = release.host_paths("netns-opener");
    for path in ["/run/docker/netns", "/var/run/docker/netns"] {
        assert_eq!(at(&opener, path).host, "/run/docker/netns");
    }
}

#[test]
fn a_directory_below_a_link_is_reached_through_the_links_parent() {
    let release = Release::render(&[
        "platform=k3s",
        "cni.binDir=/var/lib/rancher/k3s/data/current/bin",
        "cni.binMount=/var/lib/rancher/k3s/data",
    ]);
    let installer = release.host_paths("installer");
    let mount = at(&installer, "/var/lib/rancher/k3s/data");
    assert_eq!(
        mount.host, mount.at,
        "an absolute link has to resolve as on the host"
    );
    assert_eq!(
        release.flag("installer", "--cni-bin-dir").unwrap(),
        "/var/lib/rancher/k3s/data/current/bin"
    );
}

#[test]
fn the_runtimes_configuration_is_read_where_it_is_named_and_only_there() {
    let set = Release::render(&["cni.runtimeConfig=/etc/containerd/config.toml"]);
    assert_eq!(
        set.flag("installer", "--runtime-config").unwrap(),
        "/host/runtime/config.toml"
    );
    let installer = set.host_paths("installer");
    let mount = at(&installer, "/host/runtime");
    assert!(mount.read_only && mount.host == "/etc/containerd", "{mount:?}");
    let usual = Release::render(&[]);
    assert_eq!(usual.flag("installer", "--runtime-config"), None);
}

#[test]
fn openshift_gets_constraints_with_no_more_than_the_containers_ask_for() {
    let release = Release::render(&["platform=openshift"]);
    let scc = release.object("SecurityContextConstraints", "sluice-node");
    assert_eq!(
        scc["allowedCapabilities"],
        serde_json::json!(["NET_ADMIN", "SYS_ADMIN", "SYS_PTRACE"])
    );
    for refused in [
        "allowHostIPC",
        "allowHostNetwork",
        "allowHostPID",
        "allowHostPorts",
        "allowPrivilegedContainer",
        "allowPrivilegeEscalation",
    ] {
        assert_eq!(scc[refused], false, "{refused}");
    }
    assert_eq!(
        release.pod()["spec"]["securityContext"]["seLinuxOptions"]["type"],
        "spc_t"
    );
    let without = Release::render(&["platform=openshift", "profile=enrolOnAdd"]);
    assert_eq!(
        without.object("SecurityContextConstraints", "sluice-node")["allowedCapabilities"],
        serde_json::json!(["NET_ADMIN"])
    );
    let own = Release::render(&["platform=openshift", "openshift.createScc=false"]);
    assert!(
        !own.names()
            .contains(&"SecurityContextConstraints/sluice-node".to_owned())
    );
}

#[test]
fn openshift_gets_a_network_of_ours_that_pods_can_name() {
    let release = Release::render(&["platform=openshift"]);
    assert_eq!(release.flag("installer", "--mode").unwrap(), "stand-alone");
    let definition = release.object("NetworkAttachmentDefinition", "sluice-cni");
    assert_eq!(definition["apiVersion"], "k8s.cni.cncf.io/v1");
    assert_eq!(definition["metadata"]["namespace"], "default");
    // Multus then reads the file.
    assert!(definition.get("spec").is_none());
    // What the user sets wins over the platform.
    let owned = Release::render(&["platform=openshift", "cni.mode=owned"]);
    assert_eq!(owned.flag("installer", "--mode").unwrap(), "owned");
    assert!(
        !owned
            .names()
            .iter()
            .any(|name| name.contains("NetworkAttachment"))
    );
    for platform in PLATFORMS
        .iter()
        .map(|(name, ..)| name)
        .filter(|name| **name != "openshift")
    {
        let release = Release::render(&[&format!("platform={platform}")]);
        assert_eq!(
            release.flag("installer", "--mode").unwrap(),
            "owned",
            "{platform}"
        );
    }
}

#[test]
fn profiles_of_apparmor_are_a_field_or_an_annotation() {
    const ANNOTATION: &str = "container.apparmor.security.beta.kubernetes.io/netns-opener";
    let new = Release::render(&[]);
    assert_eq!(
        new.container("netns-opener")["securityContext"]["appArmorProfile"]["type"],
        "Unconfined"
    );
    assert!(new.pod()["metadata"]["annotations"].get(ANNOTATION).is_none());
    let old = Release::render_for("1.29.4", &[]);
    assert!(
        old.container("netns-opener")["securityContext"]
            .get("appArmorProfile")
            .is_none()
    );
    assert_eq!(old.pod()["metadata"]["annotations"][ANNOTATION], "unconfined");
    let annotations = old.pod()["metadata"]["annotations"].as_object().unwrap();
    assert_eq!(
        annotations.keys().filter(|key| key.contains("apparmor")).count(),
        1
    );
    // Admission policies came with 1.30 as well.
    assert!(!old.names().iter().any(|name| name.contains("Admission")));
}
