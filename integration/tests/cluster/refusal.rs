//! A pod that cannot be enrolled does not start, and its events say why.

use std::time::Duration;

use anyhow::{Context, ensure};
use sluice_proto::code::ErrorCode;
use sluice_testkit::standin::Behaviour;

use crate::harness::{Mesh, Namespace, PATIENCE, eventually, on_cluster};
use crate::load::client_spec;
use crate::pods::pod;
use crate::sluice::Sluice;

/// Reason of the kubelet's event about a sandbox that could not be made.
pub(crate) const FAILED_SANDBOX: &str = "FailedCreatePodSandBox";
/// Reason of our own event about a pod that should be in the mesh.
const NOT_IN_MESH: &str = "NotInMesh";

#[test]
fn a_failing_add_is_readable_in_the_pods_events() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let namespace = Namespace::create(cluster, "refused", Mesh::In)?;
        let refusal = "the certificate of this workload is out of order";
        sluice
            .ztunnel
            .control
            .behave(Behaviour::default().nack(&format!("{}/nacked", namespace.name), refusal))?;

        cluster.apply(&[pod(&namespace, "nacked", &client_spec())])?;
        let message = eventually("an event of the failed sandbox", PATIENCE, || {
            Ok(namespace.events("nacked", FAILED_SANDBOX)?.pop())
        })?;

        ensure!(message.contains("sluice-cni"), "not ours: {message}");
        eventually("our own event", Duration::from_secs(10), || {
            Ok(namespace.events("nacked", NOT_IN_MESH)?.pop())
        })?;
        // What people look at: component and stage, ztunnel's own words, code and what to do.
        let described = namespace.kubectl(&["describe", "pod", "nacked"])?;
        let advice = ErrorCode::ProxyNack.fix();
        for reason in [FAILED_SANDBOX, NOT_IN_MESH] {
            let line = described.lines().find(|line| line.contains(reason));
            let line = line.with_context(|| format!("no {reason} in kubectl describe:\n{described}"))?;
            for part in ["ztunnel: start proxy in the pod: ", refusal, "ZT-NACK", advice] {
                ensure!(line.contains(part), "no {part:?} in {line}");
            }
        }
        println!("refusal: {message}");

        // Once ztunnel takes it, the kubelet's next try succeeds, without hands.
        sluice.ztunnel.control.behave(Behaviour::default())?;
        namespace.wait_pod("nacked", "is Ready", PATIENCE, |pod| pod.ready)?;
        namespace.wait_pod("nacked", "annotated", Duration::from_secs(10), |pod| {
            pod.status() == Some("enabled")
        })?;
        Ok(())
    })
}

#[test]
fn without_a_proxy_a_mesh_pod_waits_and_other_pods_start() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let mesh = Namespace::create(cluster, "noproxy", Mesh::In)?;
        let plain = Namespace::create(cluster, "noproxy-plain", Mesh::Out)?;
        sluice.ztunnel.remove(cluster)?;

        cluster.apply(&[
            pod(&mesh, "waits", &client_spec()),
            pod(&plain, "starts", &client_spec()),
        ])?;
        plain.wait_pod("starts", "is Ready", PATIENCE, |pod| pod.ready)?;
        let message = eventually("an event of the failed sandbox", PATIENCE, || {
            Ok(mesh.events("waits", FAILED_SANDBOX)?.pop())
        })?;
        ensure!(message.contains("ZT-NONE"), "no code: {message}");

        sluice.ztunnel.put_back(cluster)?;
        mesh.wait_pod("waits", "is Ready", PATIENCE, |pod| pod.ready)?;
        Ok(())
    })
}
