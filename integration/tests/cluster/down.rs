//! The agent, the API server, or both are not there: pods start or fail as they should, none of the mesh unprotected, and
//! everything recovers by itself.

use std::time::Duration;

use anyhow::{Context, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use sluice_testkit::standin::Report;

use crate::enrol::rules_of;
use crate::harness::{Cluster, Mesh, Namespace, PATIENCE, eventually, on_cluster};
use crate::load::{client, client_spec};
use crate::pods::{Pod, deployment, pod, probes, server_spec};
use crate::refusal::FAILED_SANDBOX;
use crate::sandbox::{Sandbox, creation_times};
use crate::sluice::{Sluice, cri};
use crate::ztunnel::Ztunnel;

/// The longest that an ADD may take while the API server does not answer, a sandbox's other work included.
const ADD_LIMIT: Duration = Duration::from_secs(5);
/// How much longer the ADD of a pod that the broker knows may take meanwhile than one of an excluded namespace.
const KNOWN_LIMIT: Duration = Duration::from_secs(1);
/// The longest that the runtime waits for an executor that hangs: the plugin's deadlines for ADD (10 s) and for the DEL after it (3 s).
const HUNG_LIMIT: Duration = Duration::from_secs(14);

#[test]
fn without_the_agent_only_pods_outside_the_mesh_start() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let mesh = Namespace::create(cluster, "down", Mesh::In)?;
        let plain = Namespace::create(cluster, "down-plain", Mesh::Out)?;
        sluice.remove_agent()?;
        ensure!(
            sluice.chained()?,
            "the chain entry went with the agent: pods of the mesh would start unprotected"
        );

        cluster.apply(&[
            pod(&mesh, "waits", &client_spec()),
            pod(&plain, "starts", &client_spec()),
        ])?;
        plain.wait_pod("starts", "is Ready", PATIENCE, |pod| pod.ready)?;
        let message = eventually("an event of the failed sandbox", PATIENCE, || {
            Ok(mesh.events("waits", FAILED_SANDBOX)?.pop())
        })?;
        ensure!(message.contains("PLG-CONN"), "no code: {message}");
        println!("agent down: {message}");
        ensure!(!mesh.pod("waits")?.ready);

        sluice.return_agent()?;
        sluice.wait_ready()?;
        let waits = mesh.wait_pod("waits", "is Ready", PATIENCE, |pod| pod.ready)?;
        sluice.ztunnel.wait_held(&[waits], Duration::from_secs(10))?;
        Ok(())
    })
}

#[test]
fn each_container_that_hangs_lets_no_mesh_pod_start_unprotected() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let mesh = Namespace::create(cluster, "hangs", Mesh::In)?;
        for container in ["netns-executor", "ambient-broker"] {
            let process = sluice.serving_pid(container)?;
            cluster.node(&["kill", "-STOP", &process])?;
            let outcome = attempt(cluster, &mesh.name, &format!("{container}-hangs"));
            cluster.node(&["kill", "-CONT", &process])?;

            let (outcome, took) = outcome?;
            let Err(error) = outcome else {
                anyhow::bail!("a mesh pod started without {container}")
            };
            println!("{container} hangs: refused after {took:?}: {error}");
            ensure!(took <= HUNG_LIMIT, "the refusal took {took:?}");
            sluice.wait_recovered(PATIENCE)?;
        }
        Ok(())
    })
}

#[test]
fn an_opener_or_installer_that_hangs_keeps_no_pod_from_starting_enrolled() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let mesh = Namespace::create(cluster, "hangs-beside", Mesh::In)?;
        for container in ["netns-opener", "installer"] {
            let process = sluice.serving_pid(container)?;
            cluster.node(&["kill", "-STOP", &process])?;
            let name = format!("{container}-hangs");
            let started = client(&mesh, &name, cluster)
                .and_then(|pod| sluice.ztunnel.wait_held(&[pod], PATIENCE).map(drop));
            cluster.node(&["kill", "-CONT", &process])?;

            started.with_context(|| format!("{container} hangs"))?;
            sluice.wait_recovered(PATIENCE)?;
        }
        Ok(())
    })
}

#[test]
fn with_the_api_server_down_known_pods_start_and_an_unknown_one_is_answered_in_time() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let mesh = Namespace::create(cluster, "apidown", Mesh::In)?;
        let plain = Namespace::create(cluster, "apidown-plain", Mesh::Out)?;
        cluster.apply(&[pod(&mesh, "stays", &client_spec())])?;
        let stays = mesh.wait_pod("stays", "is Ready", PATIENCE, |pod| pod.ready)?;
        let (known_in, known_out) = (known(&mesh, "labelled")?, known(&plain, "other")?);

        cluster.script("up.sh", &["stop-apiserver"])?;
        let unknown = attempt(cluster, &mesh.name, "unknown");
        let excluded = attempt(cluster, "kube-system", "excluded");
        let labelled = start_known(&sluice, &mesh, &known_in);
        let other = start_known(&sluice, &plain, &known_out);
        let held = sluice.ztunnel.holds(&stays);
        cluster.script("up.sh", &["start-apiserver"])?;

        let usual = excluded.as_ref().map_or(Duration::ZERO, |(_, took)| *took);
        check_api_outage("refusing", unknown, excluded)?;
        for (known, in_mesh) in [(labelled?, true), (other?, false)] {
            println!("API server refusing: {known:?}, an excluded one {usual:?}");
            ensure!(
                known.held == in_mesh && known.redirected == in_mesh && known.took <= usual + KNOWN_LIMIT,
                "in the mesh it should be: {in_mesh}; but {known:?}"
            );
        }
        ensure!(held?, "the proxy lost a running pod");
        sluice.wait_recovered(PATIENCE)?;
        Ok(())
    })
}

/// A pod that API server and broker know and that the kubelet does not start, since a volume of it does not exist.
fn known(namespace: &Namespace<'_>, name: &str) -> anyhow::Result<Pod> {
    let mut spec = client_spec();
    spec["volumes"] = json!([{"name": "never", "configMap": {"name": "nobodys"}}]);
    spec["containers"][0]["volumeMounts"] = json!([{"name": "never", "mountPath": "/never"}]);
    namespace.create_pod(name, &spec)?;
    // By then it is bound to the node, and its watchers were told.
    eventually("the kubelet misses the volume", PATIENCE, || {
        Ok(namespace.events(name, "FailedMount")?.pop())
    })?;
    namespace.pod(name)
}

/// How the runtime made the sandbox of a pod.
#[derive(Debug)]
struct Known {
    took: Duration,
    held: bool,
    redirected: bool,
}

fn start_known(sluice: &Sluice<'_>, namespace: &Namespace<'_>, pod: &Pod) -> anyhow::Result<Known> {
    let cluster = sluice.cluster;
    let (sandbox, took) = timed(cluster, &pod.name, || {
        Sandbox::try_run_as(cluster, &namespace.name, &pod.name, &pod.uid)
    })?;
    let _sandbox = sandbox.with_context(|| format!("{}, which the broker knows", pod.name))?;
    Ok(Known {
        took,
        held: sluice.ztunnel.holds(pod)?,
        redirected: !rules_of(cluster, namespace, &pod.name)?.trim().is_empty(),
    })
}

#[test]
fn with_the_api_server_hung_an_unknown_pod_is_answered_in_time() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let mesh = Namespace::create(cluster, "apihung", Mesh::In)?;
        let server = Pid::from_raw(cluster.pid("kube-apiserver")?);

        kill(server, Signal::SIGSTOP)?;
        let unknown = attempt(cluster, &mesh.name, "unknown");
        let excluded = attempt(cluster, "kube-system", "excluded");
        kill(server, Signal::SIGCONT)?;

        check_api_outage("hung", unknown, excluded)?;
        sluice.wait_recovered(PATIENCE)?;
        Ok(())
    })
}

#[test]
fn with_agent_and_api_server_down_only_excluded_namespaces_start() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let mesh = Namespace::create(cluster, "bothdown", Mesh::In)?;
        sluice.remove_agent()?;

        cluster.script("up.sh", &["stop-apiserver"])?;
        let unknown = attempt(cluster, &mesh.name, "unknown");
        let excluded = attempt(cluster, "kube-system", "excluded");
        cluster.script("up.sh", &["start-apiserver"])?;

        check_api_outage("refusing, without the agent", unknown, excluded)?;
        sluice.return_agent()?;
        sluice.wait_ready()
    })
}

#[test]
fn with_the_agent_down_and_the_api_server_hung_only_excluded_namespaces_start() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let mesh = Namespace::create(cluster, "bothhung", Mesh::In)?;
        sluice.remove_agent()?;
        let server = Pid::from_raw(cluster.pid("kube-apiserver")?);

        kill(server, Signal::SIGSTOP)?;
        let unknown = attempt(cluster, &mesh.name, "unknown");
        let excluded = attempt(cluster, "kube-system", "excluded");
        kill(server, Signal::SIGCONT)?;

        check_api_outage("hung, without the agent", unknown, excluded)?;
        sluice.return_agent()?;
        sluice.wait_ready()
    })
}

#[test]
fn with_the_whole_control_plane_down_running_pods_go_on_and_everything_recovers() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let mesh = Namespace::create(cluster, "noplane", Mesh::In)?;
        cluster.apply(&[deployment(&mesh, "web", 3, &server_spec(&probes()))])?;
        let pods = mesh.wait_ready(3, PATIENCE)?;
        let before = sluice.ztunnel.wait_held(&pods, PATIENCE)?;

        cluster.script("up.sh", &["stop-control-plane"])?;
        let unknown = attempt(cluster, &mesh.name, "unknown");
        let excluded = attempt(cluster, "kube-system", "excluded");
        let url = format!("http://{}:8080/", pods[1].ip);
        let answer = fetch_without_api(cluster, &pods[0], &url);
        let during = sluice.ztunnel.control.counts();
        cluster.script("up.sh", &["start-control-plane"])?;

        check_api_outage("gone with the control plane", unknown, excluded)?;
        ensure!(answer?.contains(&pods[1].name), "another pod answered");
        let relayed = |report: &Report| {
            report
                .workloads
                .get(&pods[0].uid)
                .map(|held| held.counts.outbound)
        };
        ensure!(
            relayed(&during?) > relayed(&before),
            "the request went around the proxy"
        );
        sluice.wait_recovered(PATIENCE)?;
        cluster.apply(&[pod(&mesh, "later", &client_spec())])?;
        // The kubelet's own watches may come back as late as a minute after the API server (client-go's back-off).
        let later = mesh.wait_pod("later", "is Ready", 2 * PATIENCE, |pod| pod.ready)?;
        sluice.ztunnel.wait_held(&[later], PATIENCE)?;
        ensure!(
            mesh.pods()?.iter().all(|pod| pod.restarts == 0),
            "containers were restarted"
        );
        Ok(())
    })
}

#[test]
fn after_a_reboot_mesh_pods_come_back_enrolled_without_hands() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let _sluice = Sluice::ensure(cluster)?;
        let mesh = Namespace::create(cluster, "reboot", Mesh::In)?;
        cluster.apply(&[pod(&mesh, "web", &client_spec())])?;
        mesh.wait_pod("web", "is Ready", PATIENCE, |pod| pod.ready)?;

        cluster.script("node.sh", &["reboot"])?;

        // Until its container has been started again the API server has what was before.
        let (held, web) = eventually("the pod is Ready again", 2 * PATIENCE, || {
            let web = mesh.pod("web")?;
            if !web.ready || web.restarts == 0 {
                return Ok(None);
            }
            // The node's root is another now.
            let held = Ztunnel::of_node(cluster).and_then(|ztunnel| ztunnel.holds(&web));
            Ok(Some((held, web)))
        })?;
        ensure!(held?, "Ready before it was in the mesh: {web:?}");
        let sluice = Sluice::ensure(cluster)?;
        mesh.wait_pod("web", "is annotated", PATIENCE, |pod| {
            pod.ready && pod.status() == Some("enabled")
        })?;
        sluice.ztunnel.wait_held(&[web], PATIENCE)?;
        Ok(())
    })
}

/// Fetches a URL from inside a pod, through the container runtime.
fn fetch_without_api(cluster: &Cluster, from: &Pod, url: &str) -> anyhow::Result<String> {
    let label = format!("io.kubernetes.pod.uid={}", from.uid);
    let container = cri(cluster, &["ps", "--quiet", "--label", &label])?;
    cri(cluster, &["exec", container.trim(), "box", "get", url])
}

type Attempt = (anyhow::Result<()>, Duration);

/// Has the runtime make a sandbox of a pod that nobody knows; how it ended, and how long it took.
fn attempt(cluster: &Cluster, namespace: &str, name: &str) -> anyhow::Result<Attempt> {
    let (sandbox, took) = timed(cluster, name, || Sandbox::try_run(cluster, namespace, name))?;
    Ok((sandbox.map(drop), took))
}

/// What came of making a sandbox for a pod of this name, and how long that took by the runtime's log.
fn timed<'a>(
    cluster: &Cluster,
    name: &str,
    make: impl FnOnce() -> anyhow::Result<Sandbox<'a>>,
) -> anyhow::Result<(anyhow::Result<Sandbox<'a>>, Duration)> {
    let position = cluster.log("containerd")?.len();
    let sandbox = make();
    let log = cluster.log("containerd")?;
    let took = creation_times(&log[position..], name).pop();
    let took = took.context("the attempt is not in the runtime's log")?;
    Ok((sandbox, Duration::from_secs_f64(took / 1000.0)))
}

fn check_api_outage(
    how: &str,
    unknown: anyhow::Result<Attempt>,
    excluded: anyhow::Result<Attempt>,
) -> anyhow::Result<()> {
    let ((unknown, took), (excluded, excluded_took)) = (unknown?, excluded?);
    let Err(error) = unknown else {
        anyhow::bail!("an undecided pod started while the API server was {how}")
    };
    println!(
        "API server {how}: refused after {took:?}, excluded namespace passed after {excluded_took:?}: {error}"
    );
    let ours = error.to_string().contains("sluice-cni");
    ensure!(ours, "not refused by the plugin: {error:#}");
    ensure!(took <= ADD_LIMIT, "the refusal took {took:?}");
    excluded.map_err(|error| error.context(format!("excluded namespace, API server {how}")))
}
