//! Pods that are known by who they are: the agent's own, the proxy, static ones.

use sluice_selection::{Labels, OwnPods, SelectionConfig, is_static_uid, sandbox_uid};

#[test]
fn own_pods_have_the_daemon_sets_name_and_its_suffix() {
    let own = OwnPods {
        namespace: "mesh".into(),
        daemon_set: "sluice-node".into(),
    };
    for name in ["sluice-node-abcde", "sluice-node-x7k2p", "sluice-node-00000"] {
        assert!(own.contains("mesh", name), "{name}");
    }
    for name in [
        "sluice-node-",
        "sluice-node-abcd",
        "sluice-node-abcdef",
        "sluice-node-ABCDE",
        "sluice-node-ab-de",
        "sluice-nodeabcde",
        "xsluice-node-abcde",
        "sluice-node-évil",
        "sluice-node-x-abcde",
        "",
    ] {
        assert!(!own.contains("mesh", name), "{name}");
    }
    assert!(!own.contains("other", "sluice-node-abcde"));
    assert!(!SelectionConfig::default().is_own_pod("mesh", "sluice-node-abcde"));
    let config = SelectionConfig {
        own_pods: Some(own),
        ..SelectionConfig::default()
    };
    assert!(config.is_own_pod("mesh", "sluice-node-abcde"));
}

#[test]
fn the_proxy_is_known_by_namespace_and_label() {
    let config = SelectionConfig::default();
    let labels = Labels::from([("app".to_owned(), "ztunnel".to_owned())]);
    assert!(config.is_proxy("istio-system", &labels));
    assert!(!config.is_proxy("shop", &labels));
    assert!(!config.is_proxy("istio-system", &Labels::new()));
}

#[test]
fn a_mirror_pod_is_known_to_the_runtime_by_its_hash() {
    const UID: &str = "3f1c3d1e-6f4e-4a58-9f3e-0d4f3f0a1b2c";
    const HASH: &str = "0123456789abcdef0123456789abcdef";
    let with = |key: &str, value: &str| Labels::from([(key.to_owned(), value.to_owned())]);
    assert_eq!(sandbox_uid(UID, &with("kubernetes.io/config.mirror", HASH)), HASH);
    assert_eq!(
        sandbox_uid(UID, &with("kubernetes.io/config.mirror", "another-pods-uid")),
        UID
    );
    assert_eq!(sandbox_uid(UID, &Labels::new()), UID);
    assert!(is_static_uid(HASH));
    for uid in [UID, "", "0123456789ABCDEF0123456789ABCDEF", &HASH[1..]] {
        assert!(!is_static_uid(uid), "{uid}");
    }
}
