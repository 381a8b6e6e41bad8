//! A namespace's label moves running pods into and out of the mesh, without restarts and without a lost request.

use std::time::Duration;

use anyhow::ensure;

use crate::enrol::rules_of;
use crate::harness::{Mesh, Namespace, PATIENCE, on_cluster};
use crate::kubectl::Plugin;
use crate::load::{Load, client};
use crate::pods::{deployment, pod, probes, server_spec};
use crate::sluice::Sluice;
use crate::upgrade::kill_service;

#[test]
fn a_namespace_label_enrols_and_releases_running_pods_live() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let namespace = Namespace::create(cluster, "label", Mesh::Out)?;
        cluster.apply(&[deployment(&namespace, "web", 3, &server_spec(&probes()))])?;
        let pods = namespace.wait_ready(3, PATIENCE)?;
        let client = client(&namespace, "client", cluster)?;
        let mut all = pods.clone();
        all.push(client.clone());
        let urls: Vec<String> = pods
            .iter()
            .map(|pod| format!("http://{}:8080/", pod.ip))
            .collect();
        let load = Load::start(&namespace, "client", 100, &urls)?;

        for round in 0..2 {
            namespace.set_mesh(Mesh::In)?;
            sluice.ztunnel.wait_held(&all, Duration::from_secs(15))?;
            for pod in &all {
                namespace.wait_pod(&pod.name, "annotated", Duration::from_secs(10), |p| {
                    p.status() == Some("enabled")
                })?;
            }
            let before = sluice.ztunnel.workload(&client)?.counts.outbound;
            sluice.ztunnel.control.wait(
                "new connections are captured",
                Duration::from_secs(5),
                |report| {
                    report
                        .workloads
                        .get(&client.uid)
                        .is_some_and(|held| held.counts.outbound > before)
                },
            )?;

            namespace.set_mesh(Mesh::Out)?;
            for pod in &all {
                namespace.wait_pod(&pod.name, "not annotated", Duration::from_secs(15), |p| {
                    p.status().is_none()
                })?;
            }
            sluice.ztunnel.wait_released(&all, Duration::from_secs(90))?;
            let rules = rules_of(cluster, &namespace, "client")?;
            ensure!(rules.trim().is_empty(), "round {round}: rules are left:\n{rules}");
        }

        let report = load.stop()?;
        report.assert_flawless()?;
        let after = namespace.wait_ready(4, Duration::from_secs(10))?;
        ensure!(after.iter().all(|pod| pod.restarts == 0), "restarts: {after:#?}");
        ensure!(
            pods.iter().all(|pod| after.iter().any(|now| now.uid == pod.uid)),
            "pods were replaced"
        );
        println!(
            "label: {} requests, none failed, slowest {} ms",
            report.requests, report.max_millis
        );
        Ok(())
    })
}

#[test]
fn a_labelled_pod_of_an_excluded_namespace_never_joins() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let namespace = Namespace::create(cluster, "excluded", Mesh::In)?;
        let excluded = format!("selection.excludedNamespaces={{kube-system,{}}}", namespace.name);
        let sluice = Sluice::ensure_with(cluster, &[&excluded])?;
        let out = |when: &str| -> anyhow::Result<()> {
            let pod = namespace.pod("web")?;
            let held = sluice.ztunnel.control.counts()?.workloads.contains_key(&pod.uid);
            let rules = rules_of(cluster, &namespace, "web")?;
            ensure!(
                pod.status().is_none() && !held && rules.trim().is_empty(),
                "in the mesh {when}: {pod:?}\n{rules}"
            );
            Ok(())
        };
        cluster.apply(&[pod(&namespace, "web", &server_spec(&probes()))])?;
        namespace.wait_pod("web", "is Ready", PATIENCE, |pod| pod.ready)?;
        out("after its ADD")?;

        kill_service(cluster, &sluice, sluice.serving("ambient-broker")?)?;
        sluice.wait_recovered(PATIENCE)?;
        out("after a restart")?;

        // Neither its namespace's label nor its own. Another pod, in the mesh by then, shows that the labels were seen.
        let other = Namespace::create(cluster, "not-excluded", Mesh::Out)?;
        let witness = client(&other, "witness", cluster)?;
        namespace.set_mesh(Mesh::Out)?;
        namespace.set_mesh(Mesh::In)?;
        namespace.kubectl(&["label", "pod", "web", "istio.io/dataplane-mode=ambient"])?;
        other.set_mesh(Mesh::In)?;
        sluice.ztunnel.wait_held(&[witness], PATIENCE)?;
        out("after a change of labels")?;
        let name = format!("{}/web", namespace.name);
        let told = Plugin::new(cluster)?.well(&["explain", &name])?;
        ensure!(
            told.contains("=>") && told.contains("excludedNamespaces"),
            "{told}"
        );
        Ok(())
    })
}
