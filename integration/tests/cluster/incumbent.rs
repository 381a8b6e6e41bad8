//! A stand-in for a running istio-cni, as it was recorded: its entry in the network's chain, its sockets, its ZDS server
//! with the pods that it has enrolled, and its rules in them. This process holds the sockets, in the node's file system.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread::JoinHandle;

use anyhow::Context;
use prost::Message;
use serde_json::{Value, json};
use sluice_proto::pb::zds::workload_request::Payload;
use sluice_proto::pb::zds::{AddWorkload, SnapshotSent, WorkloadInfo, WorkloadRequest};
use sluice_proto::transport::seqpacket::{SeqpacketConnection, SeqpacketListener};
use sluice_testkit::incumbent::NFT_RULES;
use tokio::sync::oneshot;

use crate::enrol::netns_of;
use crate::harness::{Cluster, Namespace};
use crate::pods::{Pod, STATUS_ANNOTATION};
use crate::primaries::Original;

/// Directory of the sockets that its plugin talks to.
const RUN: &str = "/run/istio-cni";
const ZDS: &str = "/run/ztunnel/ztunnel.sock";
/// Its plugin; what stands in for it passes the result of the one before on, as its own does for a pod out of the mesh.
const PLUGIN: &str = "/opt/cni/bin/istio-cni";
/// Its policy routing, for the families that a pod of this network has.
const ROUTING: [&str; 2] = [
    "rule add fwmark 0x111/0xfff pref 32764 lookup 100",
    "route add local 0.0.0.0/0 dev lo table 100",
];

/// The running agent.
pub(crate) struct Incumbent<'a> {
    cluster: &'a Cluster,
    primary: Original<'a>,
    sockets: Vec<UnixListener>,
    zds: Option<Zds>,
}

impl<'a> Incumbent<'a> {
    /// Installs it: plugin, chain entry, sockets.
    pub(crate) fn install(cluster: &'a Cluster) -> anyhow::Result<Self> {
        let primary = Original::keep(cluster)?;
        cluster.node(&["cp", "/opt/cni/bin/tuning", PLUGIN])?;
        primary.replace(&chained(&primary.text)?)?;
        cluster.node(&["mkdir", "-p", RUN, "/run/ztunnel"])?;
        let sockets = ["pluginevent.sock", "log.sock"]
            .iter()
            .map(|name| {
                let path = cluster.node_path(&format!("{RUN}/{name}"))?;
                let _ = std::fs::remove_file(&path);
                UnixListener::bind(&path).with_context(|| format!("listening at {}", path.display()))
            })
            .collect::<anyhow::Result<Vec<_>>>()?;
        Ok(Self {
            cluster,
            primary,
            sockets,
            zds: None,
        })
    }

    /// Enrols running pods as it does: rules, hand-over to ztunnel, annotation.
    pub(crate) fn enrol(&mut self, namespace: &Namespace<'_>, pods: &[Pod]) -> anyhow::Result<()> {
        std::fs::write(self.cluster.node_path("/run/istio.nft")?, NFT_RULES)?;
        let mut workloads = Vec::new();
        for pod in pods {
            let path = netns_of(self.cluster, &namespace.name, &pod.name)?;
            let netns = format!("--net={path}");
            self.cluster
                .node(&["nsenter", &netns, "nft", "-f", "/run/istio.nft"])?;
            for command in ROUTING {
                self.cluster
                    .node_sh(&format!("nsenter {netns} ip -4 {command}"))?;
            }
            workloads.push(Workload {
                uid: pod.uid.clone(),
                info: WorkloadInfo {
                    name: pod.name.clone(),
                    namespace: namespace.name.clone(),
                    service_account: "default".to_owned(),
                },
                netns: open_netns(self.cluster, &path)?,
            });
            let annotation = format!("{STATUS_ANNOTATION}=enabled");
            namespace.kubectl(&["annotate", "--overwrite", "pod", &pod.name, &annotation])?;
        }
        self.zds = Some(Zds::serve(&self.cluster.node_path(ZDS)?, workloads)?);
        Ok(())
    }

    /// It leaves the node as its DaemonSet is deleted: connections end, every socket path that was its own is unlinked,
    /// whoever has it now, and its entry goes from the file in which it stood.
    pub(crate) fn leave(mut self) -> anyhow::Result<()> {
        self.zds = None;
        self.sockets.clear();
        for path in [
            format!("{RUN}/pluginevent.sock"),
            format!("{RUN}/log.sock"),
            ZDS.to_owned(),
        ] {
            let _ = std::fs::remove_file(self.cluster.node_path(&path)?);
        }
        self.primary.replace(&self.primary.text)?;
        self.cluster.node(&["rm", PLUGIN]).map(drop)
    }
}

/// A pod as ztunnel is told of it.
struct Workload {
    uid: String,
    info: WorkloadInfo,
    netns: File,
}

fn open_netns(cluster: &Cluster, path: &str) -> anyhow::Result<File> {
    // The node's /var/run is an absolute link, which from outside leads out of the node.
    let path = path.strip_prefix("/var").unwrap_or(path);
    File::open(cluster.node_path(path)?).with_context(|| format!("opening {path} in the node"))
}

/// A chain with its entry at the end.
fn chained(conflist: &str) -> anyhow::Result<String> {
    let mut conflist: Value = serde_json::from_str(conflist)?;
    let plugins = conflist["plugins"]
        .as_array_mut()
        .context("a list without plugins")?;
    plugins.push(json!({
        "ambient_enabled": true,
        "cni_agent_run_dir": "/var/run/istio-cni",
        "dns": {},
        "exclude_namespaces": null,
        "ipam": {},
        "name": "istio-cni",
        "plugin_log_level": "info",
        "type": "istio-cni",
    }));
    Ok(serde_json::to_string_pretty(&conflist)?)
}

/// Its ZDS server, with one client at a time as ztunnel is; ends, with its connection, when dropped.
struct Zds {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Zds {
    fn serve(path: &Path, workloads: Vec<Workload>) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let listener = {
            let _inside = runtime.enter();
            SeqpacketListener::bind(path, 0o660, None)?
        };
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            let serve = async {
                while let Ok(connection) = listener.accept().await {
                    // A client that goes comes again.
                    let _ = hand_over(&connection, &workloads).await;
                }
            };
            runtime.block_on(async {
                tokio::select! {
                    () = serve => {}
                    _ = stopped => {}
                }
            });
        });
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Zds {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The snapshot, then nothing until the client goes.
async fn hand_over(connection: &SeqpacketConnection, workloads: &[Workload]) -> anyhow::Result<()> {
    // The hello.
    connection.receive(0).await?;
    let message = |payload| {
        WorkloadRequest {
            payload: Some(payload),
        }
        .encode_to_vec()
    };
    for workload in workloads {
        let add = message(Payload::Add(AddWorkload {
            uid: workload.uid.clone(),
            workload_info: Some(workload.info.clone()),
        }));
        connection.send(&add, &[workload.netns.as_fd()]).await?;
        connection.receive(0).await?;
    }
    connection
        .send(&message(Payload::SnapshotSent(SnapshotSent {})), &[])
        .await?;
    loop {
        connection.receive(0).await?;
    }
}
