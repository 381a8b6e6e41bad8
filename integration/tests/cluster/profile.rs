//! The profile without an opener: nothing on the node may enter a namespace but the plugin.

use anyhow::ensure;

use crate::harness::{Mesh, Namespace, PATIENCE, eventually, on_cluster};
use crate::load::{client, client_spec};
use crate::pods::{deployment, probes, server_spec};
use crate::sluice::{CONTAINERS, Sluice};

const PROFILE: &str = "profile=enrolOnAdd";

#[test]
fn without_an_opener_pods_are_enrolled_when_they_are_made_and_by_a_label() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure_with(cluster, &[PROFILE])?;
        for container in CONTAINERS {
            ensure!(
                sluice.init_pid(container).is_ok() == (container != "netns-opener"),
                "{container} is not as the profile has it"
            );
        }
        let mesh = Namespace::create(cluster, "onadd", Mesh::In)?;
        cluster.apply(&[deployment(&mesh, "web", 3, &server_spec(&probes()))])?;
        let pods = mesh.wait_ready(3, PATIENCE)?;
        sluice.ztunnel.wait_held(&pods, PATIENCE)?;
        let caller = client(&mesh, "caller", cluster)?;
        let answer = mesh.fetch(&caller.name, &format!("http://{}:8080/", pods[0].ip))?;
        ensure!(answer.contains(&pods[0].name), "{answer}");
        ensure!(
            sluice.ztunnel.workload(&caller)?.counts.outbound > 0,
            "the request went around the proxy"
        );

        let plain = Namespace::create(cluster, "onadd-later", Mesh::Out)?;
        let later = client(&plain, "later", cluster)?;
        plain.set_mesh(Mesh::In)?;
        eventually("the labelled pod is enrolled", PATIENCE, || {
            Ok((plain.pod("later")?.status() == Some("enabled")).then_some(()))
        })?;
        sluice.ztunnel.wait_held(&[later], PATIENCE)?;

        // After a restart of everything it is the plugin that hands over what an opener would.
        let before = sluice.pod()?;
        cluster.kubectl(&["-n", crate::sluice::NAMESPACE, "delete", "pod", &before])?;
        sluice.wait_ready()?;
        plain.create_pod("next", &client_spec())?;
        let next = plain.wait_pod("next", "is Ready", PATIENCE, |pod| pod.ready)?;
        sluice.ztunnel.wait_held(&[next], PATIENCE)?;
        sluice.ztunnel.wait_held(&pods, PATIENCE)?;
        Ok(())
    })
}
