//! Sluice on one simulated node: all processes apart, each under its production user and capabilities and in a network
//! namespace of its own, plus the stand-in proxy in ztunnel's place.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use serde_json::json;
use sluice_proto::paths::{BROKER_UID, RunDir};
use sluice_proto::pb::executor::SnapshotDone;
use sluice_proto::pb::workload::pod_netns_client::PodNetnsClient;
use sluice_proto::pb::workload::{
    DescribeRequest, DescribeResponse, NodeRequest, NodeResponse, Pod as PodStatus, PodState,
    SubscribeRequest, pod_event,
};
use sluice_proto::transport::grpc::{UdsChannel, origin};
use sluice_testkit::cni::{Attachment, Chain, Outcome, RunningPlugin};
use sluice_testkit::netns::Netns;
use sluice_testkit::node::Node;
use sluice_testkit::pod::Pod;
use sluice_testkit::process::{Capability, Identity, Process, Spawn, binary};
use sluice_testkit::standin::Control;
use sluice_testkit::wait::poll_until;

use crate::manifests::Manifests;
use crate::netns_state::joins;

/// Long enough for anything that should happen at once, on a busy machine.
pub const SOON: Duration = Duration::from_secs(10);

/// Name of the network in CNI configurations.
pub const NETWORK: &str = "podnet";

/// What differs from a plain start.
#[derive(Debug, Clone, Default)]
pub struct MeshOptions {
    /// Further arguments of the executor.
    pub executor: Vec<String>,
    /// Further arguments of the opener.
    pub opener: Vec<String>,
    /// Further arguments of the broker.
    pub broker: Vec<String>,
    /// Further arguments of the stand-in.
    pub proxy: Vec<String>,
    /// Do not start the stand-in.
    pub without_proxy: bool,
    /// Do not start the opener.
    pub without_opener: bool,
}

/// A running node.
#[derive(Debug)]
pub struct Mesh {
    /// The opener, unless it was left out.
    pub opener: Option<Process>,
    /// The executor.
    pub executor: Process,
    /// The broker.
    pub broker: Process,
    /// The stand-in, once started.
    pub proxy: Option<Process>,
    /// Pod and Namespace manifests.
    pub manifests: Manifests,
    /// Where the sockets are.
    pub run: RunDir,
    options: MeshOptions,
    // Last, so that the processes are gone before their namespaces.
    node: Node,
}

impl Mesh {
    /// Starts everything and waits until the node serves.
    pub fn start() -> anyhow::Result<Self> {
        Self::start_with(MeshOptions::default())
    }

    /// The same with options.
    pub fn start_with(options: MeshOptions) -> anyhow::Result<Self> {
        Self::start_on(Node::new()?, options)
    }

    /// The same on a node that was prepared before.
    pub fn start_on(node: Node, options: MeshOptions) -> anyhow::Result<Self> {
        let run = node.prepare_run_dir()?;
        let manifests = Manifests::create(node.dir().join("manifests"))?;
        let executor = executor(&node, &options)?.start()?;
        let opener = (!options.without_opener)
            .then(|| opener(&node, &options)?.start())
            .transpose()?;
        let broker = broker(&node, &manifests, &options)?.start()?;
        let mut mesh = Self {
            opener,
            executor,
            broker,
            proxy: None,
            manifests,
            run,
            options,
            node,
        };
        mesh.wait_serving()?;
        if !mesh.options.without_proxy {
            mesh.start_proxy()?;
        }
        Ok(mesh)
    }

    /// The node below.
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// Starts the stand-in and waits until its snapshot was taken.
    pub fn start_proxy(&mut self) -> anyhow::Result<()> {
        let proxy = proxy(&self.node, &self.run, &self.options)?.start()?;
        let control = self.control();
        proxy.wait_ready(SOON, || control.counts().is_ok_and(|report| report.ready))?;
        self.proxy = Some(proxy);
        Ok(())
    }

    /// Waits until executor, opener and broker know each other.
    pub fn wait_serving(&self) -> anyhow::Result<()> {
        self.executor.wait_ready(SOON, || {
            self.run.cni_socket().exists() && self.run.executor_socket().exists()
        })?;
        let wants_opener = self.opener.is_some();
        self.broker.wait_ready(SOON, || {
            self.node_status().is_ok_and(|status| {
                status.executor.is_some_and(|executor| {
                    executor.broker_connected && (!wants_opener || executor.host_reachable)
                })
            })
        })
    }

    /// The stand-in's control.
    pub fn control(&self) -> Control {
        Control::new(control_socket(&self.node))
    }

    /// The CNI chain of this node: only Sluice, the primary plugin's result comes from the fixture.
    pub fn chain(&self) -> anyhow::Result<Chain> {
        self.chain_with("1.0.0", Vec::new())
    }

    /// The chain in a version of the CNI specification, behind `before`.
    pub fn chain_with(&self, version: &str, before: Vec<serde_json::Value>) -> anyhow::Result<Chain> {
        let mut plugins = before;
        plugins.push(json!({ "type": "sluice-cni", "runDir": self.run.root() }));
        let plugin = binary("sluice-cni")?;
        let directory = plugin.parent().context("plugin without a directory")?;
        Ok(Chain::new(self.node.place(), NETWORK, version, plugins).bin_dir(directory))
    }

    /// ADD of a pod whose interface the fixture has made.
    pub fn add(&self, pod: &Pod) -> anyhow::Result<Outcome> {
        self.chain()?
            .add(&Attachment::from(pod), Some(&pod.prev_result("1.0.0")))
    }

    /// Starts the plugin's ADD of a pod and does not wait for it.
    pub fn start_add(&self, pod: &Pod) -> anyhow::Result<RunningPlugin> {
        let chain = self.chain()?;
        let plugin = chain.plugins.last().context("an empty chain")?;
        chain.start(
            plugin,
            "ADD",
            Some(&Attachment::from(pod)),
            Some(&pod.prev_result("1.0.0")),
        )
    }

    /// DEL of a pod.
    pub fn del(&self, pod: &Pod) -> anyhow::Result<Outcome> {
        self.chain()?.del(&Attachment::from(pod), None)
    }

    /// The node as the broker tells it.
    pub fn node_status(&self) -> anyhow::Result<NodeResponse> {
        self.ask(async |mut client| Ok(client.node(NodeRequest {}).await?.into_inner()))
    }

    /// One pod as the broker tells it, read back from the kernel.
    pub fn describe(&self, pod: &Pod) -> anyhow::Result<DescribeResponse> {
        let request = DescribeRequest {
            namespace: pod.namespace().to_owned(),
            name: pod.name().to_owned(),
        };
        self.ask(async |mut client| Ok(client.describe(request).await?.into_inner()))
    }

    /// All pods as the broker tells them.
    pub fn pods(&self) -> anyhow::Result<Vec<PodStatus>> {
        self.ask(async |mut client| {
            let mut events = client.subscribe(SubscribeRequest {}).await?.into_inner();
            let mut pods = Vec::new();
            while let Some(event) = events.message().await? {
                match event.event {
                    Some(pod_event::Event::Present(pod)) => pods.push(pod),
                    Some(pod_event::Event::SnapshotDone(SnapshotDone {})) => break,
                    _ => {}
                }
            }
            Ok(pods)
        })
    }

    /// The state of one pod, if the broker knows it.
    pub fn pod_state(&self, pod: &Pod) -> Option<PodStatus> {
        self.pods()
            .ok()?
            .into_iter()
            .find(|status| status.pod.as_ref().is_some_and(|known| known.uid == pod.uid()))
    }

    /// Waits until the broker says that a pod is in `state`; and if that is enrolled, until the executor is done with the
    /// connections that the pod had: rules are the same from then on.
    pub fn wait_state(&self, pod: &Pod, state: PodState, within: Duration) -> anyhow::Result<PodStatus> {
        let what = format!("pod {} is {}", pod.name(), state.as_str_name());
        let mut last = None;
        poll_until(&what, within, || {
            last = self.pod_state(pod);
            let done = || state != PodState::Enrolled || !joins(pod.netns()).unwrap_or(false);
            last.clone().filter(|status| status.state() == state && done())
        })
        .with_context(|| format!("last seen: {last:?}"))
    }

    fn ask<T>(
        &self,
        call: impl AsyncFnOnce(PodNetnsClient<UdsChannel>) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        runtime.block_on(async {
            let work = async {
                let channel = UdsChannel::dial("broker", &self.run.workload_socket()).await?;
                call(PodNetnsClient::with_origin(channel, origin())).await
            };
            tokio::time::timeout(SOON, work)
                .await
                .context("the broker does not answer")?
        })
    }
}

fn control_socket(node: &Node) -> PathBuf {
    node.dir().join("proxy-control.sock")
}

/// Groups of every container of the chart: the broker's and ztunnel's.
const GROUPS: [u32; 2] = [BROKER_UID, 1337];

fn executor(node: &Node, options: &MeshOptions) -> anyhow::Result<Spawn> {
    Ok(Spawn::binary("netns-executor")?
        .arg("--run-dir")
        .arg(node.run_dir().root())
        .args(&options.executor)
        .place(node.place_with(&Netns::new()?))
        .identity(Identity::root_with(&[Capability::CAP_NET_ADMIN]).in_groups(&GROUPS))
        .log(node.dir().join("netns-executor.log")))
}

fn opener(node: &Node, options: &MeshOptions) -> anyhow::Result<Spawn> {
    Ok(Spawn::binary("netns-opener")?
        .arg("--run-dir")
        .arg(node.run_dir().root())
        .arg("--host-netns")
        .arg(node.netns_path())
        .arg("--netns-dir")
        .arg(node.netns_dir())
        .args(&options.opener)
        .place(node.place_with(&Netns::new()?))
        .identity(
            Identity::root_with(&[Capability::CAP_SYS_ADMIN, Capability::CAP_SYS_PTRACE]).in_groups(&GROUPS),
        )
        .log(node.dir().join("netns-opener.log")))
}

fn broker(node: &Node, manifests: &Manifests, options: &MeshOptions) -> anyhow::Result<Spawn> {
    Ok(Spawn::binary("ambient-broker")?
        .arg("--run-dir")
        .arg(node.run_dir().root())
        .arg("--manifests")
        .arg(manifests.path())
        .args(&options.broker)
        .place(node.place_with(&Netns::new()?))
        .identity(Identity::user(BROKER_UID).in_groups(&GROUPS))
        .log(node.dir().join("ambient-broker.log")))
}

fn proxy(node: &Node, run: &RunDir, options: &MeshOptions) -> anyhow::Result<Spawn> {
    Ok(Spawn::binary("standin-proxy")?
        .arg("--zds")
        .arg(run.zds_socket())
        .arg("--control")
        .arg(control_socket(node))
        .args(&options.proxy)
        .place(node.place_with(&Netns::new()?))
        .log(node.dir().join("standin-proxy.log")))
}
