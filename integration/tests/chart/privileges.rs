//! What each container may do, as rendered.

use serde_json::{Value, json};
use sluice_proto::paths::BROKER_UID;

use crate::helm::{Release, texts};

/// container, uid, capabilities; in the order in which the kubelet starts them.
pub(crate) const CONTAINERS: [(&str, u32, &[&str]); 6] = [
    ("installer", 0, &[]),
    ("netns-opener", 0, &["SYS_ADMIN", "SYS_PTRACE"]),
    ("ambient-broker", BROKER_UID, &[]),
    ("netns-executor", 0, &["NET_ADMIN"]),
    ("ambient-broker-spare", BROKER_UID, &[]),
    ("netns-executor-spare", 0, &["NET_ADMIN"]),
];

fn both_profiles() -> [Release; 2] {
    [Release::render(&[]), Release::render(&["profile=enrolOnAdd"])]
}

#[test]
fn each_container_has_exactly_its_capabilities_and_user() {
    let release = Release::render(&[]);
    let names: Vec<&str> = release.containers().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, CONTAINERS.map(|(name, ..)| name));
    for (name, uid, capabilities) in CONTAINERS {
        let context = &release.container(name)["securityContext"];
        assert_eq!(texts(&context["capabilities"]["add"]), capabilities, "{name}");
        assert_eq!(context["capabilities"]["drop"], json!(["ALL"]), "{name}");
        assert_eq!(context["runAsUser"], uid, "{name}");
        assert_eq!(context["runAsGroup"], uid, "{name}");
        assert_eq!(context["runAsNonRoot"], uid != 0, "{name}");
    }
}

#[test]
fn a_spare_is_as_the_container_that_it_stands_in_for() {
    let release = Release::render(&[]);
    let lease = |container: &Value| {
        let mounts = container["volumeMounts"].as_array().into_iter().flatten();
        let leases = mounts.filter(|mount| mount["mountPath"] == "/var/lib/lease");
        leases.map(|mount| mount["name"].clone()).collect::<Vec<_>>()
    };
    for name in ["ambient-broker", "netns-executor"] {
        let (mut first, mut spare) = (
            release.container(name).clone(),
            release.container(&format!("{name}-spare")).clone(),
        );
        assert_eq!(lease(&first).len(), 1, "{name}");
        let args = first["args"].as_array().unwrap();
        assert!(
            args.ends_with(&["--pod-lease".into(), "/var/lib/lease".into()]),
            "{name}"
        );
        for container in [&mut first, &mut spare] {
            container["name"] = Value::Null;
            // Scraped once.
            container["ports"] = Value::Null;
        }
        assert_eq!(first, spare, "{name}");
    }
    let openshift = Release::render(&["platform=openshift"]);
    let constraints = openshift.object("SecurityContextConstraints", "sluice-node");
    assert!(texts(&constraints["volumes"]).contains(&"emptyDir"));
    let alone = Release::render(&["spares=false"]);
    let names: Vec<&str> = alone.containers().into_iter().map(|(name, _)| name).collect();
    assert_eq!(
        names,
        CONTAINERS[..4].iter().map(|(name, ..)| *name).collect::<Vec<_>>()
    );
    assert!(lease(alone.container("ambient-broker")).is_empty());
}

#[test]
fn no_container_can_gain_privileges_or_write_to_its_image() {
    for release in both_profiles() {
        for (name, container) in release.containers() {
            let context = &container["securityContext"];
            assert_eq!(context["privileged"], false, "{name}");
            assert_eq!(context["allowPrivilegeEscalation"], false, "{name}");
            assert_eq!(context["readOnlyRootFilesystem"], true, "{name}");
            assert_eq!(
                context["seccompProfile"],
                json!({"type": "RuntimeDefault"}),
                "{name}"
            );
        }
    }
}

#[test]
fn the_hosts_namespaces_are_not_shared() {
    for release in both_profiles() {
        let spec = &release.pod()["spec"];
        for key in ["hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"] {
            assert!(spec[key].is_null() || spec[key] == false, "{key}");
        }
        for (name, container) in release.containers() {
            for port in container["ports"].as_array().into_iter().flatten() {
                assert!(port["hostPort"].is_null(), "{name}: {port}");
            }
        }
    }
}

#[test]
fn without_the_opener_nobody_has_sys_admin_or_the_hosts_proc() {
    let release = Release::render(&["profile=enrolOnAdd"]);
    let text = release.pod().to_string();
    for absent in [
        "SYS_ADMIN",
        "SYS_PTRACE",
        "Unconfined",
        "\"/proc\"",
        "netns-opener",
        "/var/run/netns",
    ] {
        assert!(!text.contains(absent), "{absent}");
    }
    assert_eq!(release.containers().len(), CONTAINERS.len() - 1);
}

#[test]
fn only_the_broker_has_an_api_token() {
    let release = Release::render(&["takeover.istioCni=true"]);
    let spec = &release.pod()["spec"];
    assert_eq!(spec["automountServiceAccountToken"], false);
    for account in ["sluice-node", "sluice-plugin", "sluice-retire"] {
        assert_eq!(
            release.object("ServiceAccount", account)["automountServiceAccountToken"],
            false,
            "{account}"
        );
    }
    let holds_token = |volume: &&Value| volume.to_string().contains("serviceAccountToken");
    let volumes = spec["volumes"].as_array().unwrap();
    let tokens: Vec<&Value> = volumes
        .iter()
        .filter(holds_token)
        .map(|volume| &volume["name"])
        .collect();
    assert_eq!(tokens, [&json!("api-token")]);
    for (name, container) in release.containers() {
        let mounted = container["volumeMounts"]
            .as_array()
            .unwrap()
            .iter()
            .any(|mount| mount["name"] == "api-token");
        assert_eq!(mounted, name.starts_with("ambient-broker"), "{name}");
        assert!(
            container["env"]
                .to_string()
                .matches("secretKeyRef")
                .next()
                .is_none()
        );
    }
}

/// `host path > mount path (ro)`, sorted.
fn mounts(release: &Release, container: &str) -> Vec<String> {
    let mut list: Vec<String> = release
        .host_paths(container)
        .into_iter()
        .map(|path| {
            let read_only = if path.read_only { " ro" } else { "" };
            if path.host == path.at {
                format!("{}{read_only}", path.host)
            } else {
                format!("{} at {}{read_only}", path.host, path.at)
            }
        })
        .collect();
    list.sort();
    list
}

#[test]
fn each_container_sees_only_its_directories_of_the_host() {
    let release = Release::render(&[]);
    assert_eq!(
        mounts(&release, "netns-executor"),
        [
            "/run/sluice/cni",
            "/run/sluice/executor",
            "/run/sluice/opener",
            "/run/sluice/state"
        ]
    );
    assert_eq!(
        mounts(&release, "netns-opener"),
        [
            "/proc at /host/proc ro",
            "/run/sluice/opener ro",
            "/var/run/netns at /run/netns ro",
            "/var/run/netns ro",
        ]
    );
    assert_eq!(
        mounts(&release, "ambient-broker"),
        [
            "/run/sluice/broker",
            "/run/sluice/executor ro",
            "/run/sluice/node",
            "/var/run/ztunnel"
        ]
    );
    assert_eq!(
        mounts(&release, "installer"),
        [
            "/etc/cni/net.d at /host/etc/cni/net.d",
            "/opt/cni/bin at /host/opt/cni/bin",
            "/run/sluice/broker",
            "/run/sluice/node",
            "/run/sluice/plugin",
            "/var/lib/sluice",
            "/var/run/ztunnel",
        ]
    );
}

#[test]
fn broker_and_installer_pass_pod_security_restricted_but_for_their_host_paths() {
    // https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted, container by container.
    let release = Release::render(&[]);
    let broker = &release.container("ambient-broker")["securityContext"];
    assert_eq!(broker["runAsNonRoot"], true);
    for name in ["ambient-broker", "installer"] {
        let context = &release.container(name)["securityContext"];
        assert!(context["capabilities"]["add"].is_null(), "{name}");
        assert_eq!(context["allowPrivilegeEscalation"], false, "{name}");
        assert_eq!(context["seccompProfile"]["type"], "RuntimeDefault", "{name}");
        assert!(context["appArmorProfile"].is_null(), "{name}");
    }
}

#[test]
fn every_container_has_probes_and_resources_of_its_own() {
    let release = Release::render(&[]);
    for (name, container) in release.containers() {
        assert!(container["resources"]["requests"]["memory"].is_string(), "{name}");
        assert!(container["resources"]["limits"]["memory"].is_string(), "{name}");
        // A limit on CPU time would stretch ADDs of pods.
        assert!(container["resources"]["limits"]["cpu"].is_null(), "{name}");
        assert!(container["livenessProbe"].is_object(), "{name}");
    }
    // Through its own binary, since nothing else is in the image.
    for name in ["netns-executor", "netns-opener", "installer"] {
        let command = texts(&release.container(name)["livenessProbe"]["exec"]["command"]);
        assert!(
            command.contains(&format!("/opt/sluice/bin/{name}").as_str()),
            "{command:?}"
        );
    }
    let set = Release::render(&[
        "executor.resources.limits.memory=99Mi",
        "opener.resources.requests.cpu=1m",
    ]);
    assert_eq!(
        set.container("netns-executor")["resources"]["limits"]["memory"],
        "99Mi"
    );
    assert_eq!(
        set.container("netns-opener")["resources"]["requests"]["cpu"],
        "1m"
    );
}

#[test]
fn the_plugins_credentials_survive_a_reboot_and_only_the_installer_sees_them() {
    let release = Release::render(&[]);
    let path = release.flag("installer", "--kubeconfig").unwrap();
    // Not below the run directory, which a reboot empties, and at the host's own path, which the plugin is told.
    assert_eq!(path, "/var/lib/sluice/kubeconfig");
    for (name, _) in release.containers() {
        let sees = release
            .host_paths(name)
            .iter()
            .any(|mount| mount.host == "/var/lib/sluice" && mount.at == mount.host);
        assert_eq!(sees, name == "installer", "{name}");
    }
}

#[test]
fn a_node_may_have_to_be_ready_for_a_while() {
    let readiness = |set: &[&str]| Release::render(set).container("ambient-broker")["readinessProbe"].clone();
    assert_eq!(readiness(&[])["successThreshold"], 1);
    let set = readiness(&["broker.readyAfterSeconds=30"]);
    // As many answers in a row, one a second.
    assert_eq!(
        (&set["successThreshold"], &set["periodSeconds"]),
        (&json!(30), &json!(1))
    );
}

#[test]
fn an_operator_may_give_the_installer_what_foreign_owned_directories_need() {
    let release = Release::render(&["installer.capabilities={DAC_OVERRIDE}"]);
    let context = &release.container("installer")["securityContext"];
    assert_eq!(context["capabilities"]["add"], json!(["DAC_OVERRIDE"]));
    // It drops what it is not told to keep.
    let told = |release: &Release| texts(&release.container("installer")["args"]).contains(&"--dac-override");
    assert!(told(&release) && !told(&Release::render(&[])));
}
