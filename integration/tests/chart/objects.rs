//! Which objects there are, and what RBAC says.

use serde_json::{Value, json};

use crate::helm::{NAMESPACE, Release, text, texts};

#[test]
fn nothing_but_what_is_needed_is_created() {
    assert_eq!(
        Release::render(&[]).names(),
        [
            "ClusterRole/sluice-node",
            "ClusterRole/sluice-plugin",
            "ClusterRoleBinding/sluice-node",
            "ClusterRoleBinding/sluice-plugin",
            "ConfigMap/sluice-node",
            "DaemonSet/sluice-node",
            "Job/sluice-retire",
            "Role/sluice-node",
            "Role/sluice-retire",
            "RoleBinding/sluice-node",
            "RoleBinding/sluice-retire",
            "ServiceAccount/sluice-node",
            "ServiceAccount/sluice-plugin",
            "ServiceAccount/sluice-retire",
            "ValidatingAdmissionPolicy/sluice-node",
            "ValidatingAdmissionPolicyBinding/sluice-node",
        ]
    );
}

#[test]
fn options_add_their_object_and_nothing_else() {
    let usual = Release::render(&[]).names();
    for (set, added) in [
        ("platform=gke", ["ResourceQuota/sluice-node"].as_slice()),
        ("resourceQuota.enabled=true", &["ResourceQuota/sluice-node"]),
        (
            "platform=openshift",
            &[
                "NetworkAttachmentDefinition/sluice-cni",
                "SecurityContextConstraints/sluice-node",
            ],
        ),
        ("cni.mode=standAlone", &["NetworkAttachmentDefinition/sluice-cni"]),
        ("metrics.podMonitor.enabled=true", &["PodMonitor/sluice-node"]),
        ("networkPolicy.enabled=true", &["NetworkPolicy/sluice-node"]),
    ] {
        let mut names = Release::render(&[set]).names();
        names.retain(|name| !usual.contains(name));
        assert_eq!(names, added, "{set}");
    }
}

#[test]
fn the_objects_of_the_cluster_and_those_of_a_namespace_can_be_installed_apart() {
    let everything = [
        "platform=openshift",
        "resourceQuota.enabled=true",
        "networkPolicy.enabled=true",
        "metrics.podMonitor.enabled=true",
    ];
    let scope = |scope: &str| {
        let scope = format!("resourceScope={scope}");
        Release::render(&[everything.as_slice(), &[scope.as_str()]].concat())
    };
    let (all, cluster, namespace) = (scope("all"), scope("cluster"), scope("namespace"));
    let within = |object: &Value| object["metadata"]["namespace"].is_string();
    assert!(!cluster.objects.iter().any(within), "{:?}", cluster.names());
    assert!(namespace.objects.iter().all(within), "{:?}", namespace.names());
    let mut both = [cluster.names(), namespace.names()].concat();
    both.sort();
    assert_eq!(both, all.names());
    assert_eq!(all.names(), Release::render(&everything).names());
    // The same objects: neither knows more than in one release.
    for object in cluster.objects.iter().chain(&namespace.objects) {
        assert!(all.objects.contains(object), "{object:#}");
    }
}

#[test]
fn every_object_carries_the_releases_labels_and_lies_in_its_namespace() {
    let release = Release::render(&["platform=gke", "networkPolicy.enabled=true"]);
    for object in &release.objects {
        let kind = text(object, "/kind");
        let cluster_wide = kind.starts_with("Cluster") || kind.starts_with("ValidatingAdmission");
        let namespace = object["metadata"]["namespace"].as_str();
        assert_eq!(namespace, (!cluster_wide).then_some(NAMESPACE), "{kind}");
        assert_eq!(
            text(object, "/metadata/labels/app.kubernetes.io~1instance"),
            "mesh",
            "{kind}"
        );
    }
}

/// Every permission as `verb group/resource[=names]`, sorted.
fn permissions(role: &Value) -> Vec<String> {
    let mut all = Vec::new();
    for rule in role["rules"].as_array().unwrap() {
        for group in texts(&rule["apiGroups"]) {
            for resource in texts(&rule["resources"]) {
                for verb in texts(&rule["verbs"]) {
                    let names = texts(&rule["resourceNames"]).join(",");
                    let names = if names.is_empty() {
                        names
                    } else {
                        format!("={names}")
                    };
                    all.push(format!("{verb} {group}/{resource}{names}"));
                }
            }
        }
    }
    all.sort();
    all
}

#[test]
fn the_broker_may_do_what_it_does_and_nothing_else() {
    let release = Release::render(&[]);
    assert_eq!(
        permissions(release.object("ClusterRole", "sluice-node")),
        [
            "create events.k8s.io/events",
            "get /namespaces",
            "get /nodes",
            "get /pods",
            "list /namespaces",
            "list /pods",
            "patch /pods/status",
            "patch events.k8s.io/events",
            "watch /namespaces",
            "watch /pods",
        ]
    );
    assert_eq!(
        permissions(release.object("Role", "sluice-node")),
        [
            "create /serviceaccounts/token=sluice-plugin",
            "get apps/daemonsets=sluice-node",
            "watch apps/daemonsets=sluice-node",
        ]
    );
}

#[test]
fn the_plugins_account_may_look_at_one_pod_and_nothing_else() {
    let release = Release::render(&[]);
    assert_eq!(
        permissions(release.object("ClusterRole", "sluice-plugin")),
        ["get /namespaces", "get /pods"]
    );
    let bound = |account: &str| {
        let bindings = release
            .objects
            .iter()
            .filter(|object| text(object, "/kind").ends_with("Binding"));
        bindings
            .filter(|binding| {
                binding["subjects"]
                    .as_array()
                    .is_some_and(|subjects| subjects.iter().any(|subject| subject["name"] == account))
            })
            .count()
    };
    assert_eq!(bound("sluice-plugin"), 1);
    assert_eq!(bound("sluice-node"), 2);
}

#[test]
fn what_retires_the_agent_lives_only_while_the_release_is_deleted() {
    let release = Release::render(&[]);
    for object in &release.objects {
        let annotations = &object["metadata"]["annotations"];
        if text(object, "/metadata/name") == "sluice-retire" {
            assert_eq!(annotations["helm.sh/hook"], "pre-delete", "{object:#}");
            assert_eq!(
                annotations["helm.sh/hook-delete-policy"],
                "before-hook-creation,hook-succeeded"
            );
        } else {
            assert!(annotations.get("helm.sh/hook").is_none(), "{object:#}");
        }
    }
    assert_eq!(
        permissions(release.object("Role", "sluice-retire")),
        [
            "get apps/daemonsets=sluice-node",
            "list /pods",
            "patch apps/daemonsets=sluice-node"
        ]
    );
    let job = release.object("Job", "sluice-retire");
    let context = &job["spec"]["template"]["spec"]["containers"][0]["securityContext"];
    assert_eq!(context["runAsNonRoot"], true);
    assert!(context["capabilities"]["add"].is_null());
    let without = Release::render(&["retire.enabled=false"]).names();
    assert!(!without.iter().any(|name| name.contains("retire")), "{without:?}");
}

#[test]
fn no_rule_has_a_wildcard() {
    for object in Release::render(&["platform=openshift"]).objects {
        for rule in object["rules"].as_array().into_iter().flatten() {
            assert!(!rule.to_string().contains('*'), "{rule}");
        }
    }
}

#[test]
fn a_changed_selection_restarts_the_pods_and_nothing_else_does() {
    let sum = |set: &[&str]| {
        let release = Release::render(set);
        text(release.pod(), "/metadata/annotations/checksum~1selection").to_owned()
    };
    let usual = sum(&[]);
    assert_eq!(sum(&["resourceQuota.pods=6"]), usual);
    assert_ne!(sum(&["selection.excludedNamespaces={a,b}"]), usual);
    assert_ne!(sum(&["selection.dnsCapture=false"]), usual);
}

#[test]
fn the_selection_names_our_own_pods() {
    let release = Release::render(&["selection.systemNamespace=mesh"]);
    let config = text(release.object("ConfigMap", "sluice-node"), "/data/selection.yaml");
    let config: Value = serde_saphyr::from_str(config).unwrap();
    assert_eq!(
        config["ownPods"],
        json!({"namespace": NAMESPACE, "daemonSet": "sluice-node"})
    );
    assert_eq!(config["systemNamespace"], "mesh");
    assert_eq!(config["excludedNamespaces"], json!(["kube-system"]));
    // Left out: the services' default counts.
    assert!(config.get("enablementSelectors").is_none(), "{config}");
}

#[test]
fn scraping_is_announced_unless_switched_off() {
    let annotation = |set: &[&str]| {
        let release = Release::render(set);
        release.pod()["metadata"]["annotations"]["prometheus.io/port"].clone()
    };
    assert_eq!(annotation(&[]), "15014");
    assert_eq!(annotation(&["broker.port=9100"]), "9100");
    assert_eq!(annotation(&["metrics.scrapeAnnotations=false"]), Value::Null);
}

#[test]
fn the_pod_can_go_to_every_node_and_is_not_evicted() {
    let release = Release::render(&[]);
    let spec = &release.pod()["spec"];
    assert_eq!(spec["tolerations"], json!([{"operator": "Exists"}]));
    assert_eq!(spec["priorityClassName"], "system-node-critical");
    assert_eq!(spec["terminationGracePeriodSeconds"], 30);
    assert_eq!(spec["nodeSelector"], json!({"kubernetes.io/os": "linux"}));
    let set = release.object("DaemonSet", "sluice-node");
    assert_eq!(
        set["spec"]["updateStrategy"],
        json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}})
    );
    assert_eq!(
        text(release.pod(), "/metadata/labels/istio.io~1dataplane-mode"),
        "none"
    );
}
