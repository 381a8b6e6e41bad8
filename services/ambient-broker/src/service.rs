//! Puts the parts together: sockets first, then the source, then the executor's watch.
//!
//! The watch begins only when the source has told everything: until then the executor answers ADDs by `NO_BROKER`
//! and the plugin decides by itself, which is better than refusing pods out of an empty cache.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use sluice_proto::paths::RunDir;
use sluice_proto::transport::kept::KeptListener;
use sluice_proto::transport::seqpacket::SeqpacketListener;
use sluice_proto::transport::uds::{BindError, PeerPolicy};
use sluice_selection::SelectionConfig;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::compat::Compatibility;
use crate::door::doors;
use crate::driver::{Beat, Driver, Parts, Query};
use crate::executor::Executor;
use crate::farewell::{self, Farewell};
use crate::handoff;
use crate::health::Health;
use crate::http::Monitoring;
use crate::lifecycle::{Node, NodeFacts};
use crate::metrics::Metrics;
use crate::port::PortOwner;
use crate::reconcile::{Event, Settings};
use crate::registry::Registry;
use crate::serving::{serve_node, serve_tcp, serve_unix, serve_workloads};
use crate::source::{PodSource, SourceEvent};
use crate::status::StatusWriter;
use crate::workload::{Problems, Workloads};
use crate::zds::{self, Zds};

/// Requests under way may take this long after the process was asked to stop.
const GRACE: Duration = Duration::from_secs(2);

/// How the broker runs.
#[derive(Debug)]
pub struct Config {
    /// Where the sockets are.
    pub run: RunDir,
    /// Who is in the mesh.
    pub selection: SelectionConfig,
    /// Numbers.
    pub settings: Settings,
    /// The ZDS server.
    pub zds: zds::Options,
    /// Also serve metrics and health over TCP.
    pub listen: Option<std::net::SocketAddr>,
    /// Serve `/cmdadd` on a socket of this mode.
    pub istio_cni: Option<u32>,
    /// Who may ask for workload state.
    pub workload_peers: PeerPolicy,
    /// Not ready without a ready ztunnel connection.
    pub require_ztunnel: bool,
    /// Name of the pod that we are a part of; empty where there is none.
    pub agent: String,
    /// Serve the installer, which asks this of the cluster.
    pub node: Option<Arc<dyn NodeFacts>>,
}

/// The broker cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A Unix socket.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The TCP socket.
    #[error("cannot listen on {address}{owner}")]
    Listen {
        /// Where.
        address: std::net::SocketAddr,
        /// Who has the port.
        owner: PortOwner,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

struct Listeners {
    zds: SeqpacketListener,
    workload: KeptListener,
    http: KeptListener,
    compatibility: Option<KeptListener>,
    tcp: Option<TcpListener>,
    node: Option<KeptListener>,
}

/// Everything that serves somebody; shares its parts with the loop.
struct Servers {
    monitoring: Monitoring,
    compatibility: Compatibility,
    workloads: Workloads,
}

/// Runs the broker, which has the right to serve ([`crate::standby`]), until `stop` is cancelled. Nothing in any pod changes when
/// it ends: rules stay, ztunnel keeps its proxies.
pub async fn run(
    config: Config,
    source: Arc<dyn PodSource>,
    status: Arc<dyn StatusWriter>,
    stop: CancellationToken,
) -> Result<(), StartError> {
    let (events, inbox) = mpsc::unbounded_channel();
    let (queries, questions) = mpsc::channel(64);
    let executor = Executor::new(config.run.clone(), &config.selection, config.agent.clone());
    let zds = Zds::new(config.zds.clone(), events.clone());
    let listeners = bind(&config, &zds).await?;
    let beat = Beat::default();
    let health = Health::new(beat.clone(), executor.clone(), zds.clone())
        .requiring(config.node.is_some(), config.require_ztunnel);
    health.set_listening();
    let parts = Parts {
        executor: executor.clone(),
        zds: zds.clone(),
        source: source.clone(),
        status,
        registry: Registry::default(),
        metrics: Arc::new(Metrics::default()),
        beat,
    };
    let servers = servers(&parts, &events, &queries, &health, &stop);
    let handoffs = handoff::tell(parts.registry.clone(), executor.clone(), stop.clone());
    let feeding = Feed {
        source,
        events: events.clone(),
        problems: servers.workloads.problems.clone(),
        health,
        metrics: parts.metrics.clone(),
        executor,
        tasks: TaskTracker::new(),
        stop: stop.clone(),
        // The loop and what it talks to outlive the listeners, so that ADDs under way can finish.
        end: CancellationToken::new(),
    };
    let (tasks, end) = (feeding.tasks.clone(), feeding.end.clone());
    let (ready, metrics) = (feeding.health.clone(), feeding.metrics.clone());
    let driver = Driver::new(config.settings, config.selection, parts, events, inbox, questions);
    tasks.spawn(driver.run(end.clone()));
    tasks.spawn(handoffs);
    tasks.spawn(time_until_ready(ready, metrics.clone(), stop.clone()));
    tasks.spawn(zds.clone().serve(listeners.zds, stop.clone(), end.clone()));
    let [workload, http, plugin, installer] = doors(config.workload_peers, &metrics);
    let mut farewell = None;
    if let Some((listener, facts)) = listeners.node.zip(config.node) {
        let node = Node::new(facts, feeding.health.clone(), config.agent);
        farewell = Some(Farewell {
            node: node.clone(),
            executor: feeding.executor.clone(),
            zds: zds.clone(),
        });
        serve_node(listener, installer, node, &tasks, &stop, &end);
    }
    serve_unix(listeners.http, http, servers.monitoring.clone(), &tasks, &stop);
    if let Some(listener) = listeners.compatibility {
        serve_unix(listener, plugin, servers.compatibility, &tasks, &stop);
    }
    if let Some(listener) = listeners.tcp {
        serve_tcp(listener, servers.monitoring, &tasks, &stop);
    }
    serve_workloads(listeners.workload, workload, servers.workloads, &tasks, &stop);
    tasks.spawn(feed(feeding));
    stop.cancelled().await;
    let leaves = match farewell {
        Some(farewell) => farewell.say().await,
        None => false,
    };
    finish(&tasks, &end, &queries).await;
    if leaves {
        farewell::remove_sockets(&config.run, &config.zds.socket);
    }
    Ok(())
}

/// Notes how long it took until new pods could be taken.
async fn time_until_ready(health: Health, metrics: Arc<Metrics>, stop: CancellationToken) {
    let started = tokio::time::Instant::now();
    let ready = async {
        health.first_ready().await;
        metrics.ready(started.elapsed());
    };
    tokio::select! { () = ready => {}, () = stop.cancelled() => {} }
}

fn servers(
    parts: &Parts,
    events: &mpsc::UnboundedSender<Event>,
    queries: &mpsc::Sender<Query>,
    health: &Health,
    stop: &CancellationToken,
) -> Servers {
    Servers {
        monitoring: Monitoring {
            metrics: parts.metrics.clone(),
            health: health.clone(),
            zds: parts.zds.clone(),
            registry: parts.registry.clone(),
            executor: parts.executor.clone(),
            stop: stop.clone(),
        },
        compatibility: Compatibility {
            executor: parts.executor.clone(),
            events: events.clone(),
            queries: queries.clone(),
            registry: parts.registry.clone(),
            metrics: parts.metrics.clone(),
        },
        workloads: Workloads {
            registry: parts.registry.clone(),
            queries: queries.clone(),
            executor: parts.executor.clone(),
            zds: parts.zds.clone(),
            health: health.clone(),
            problems: Problems::default(),
        },
    }
}

/// Lets ADDs under way get their verdict, then ends the rest; both within [`GRACE`].
async fn finish(tasks: &TaskTracker, end: &CancellationToken, queries: &mpsc::Sender<Query>) {
    let until = tokio::time::Instant::now() + GRACE;
    let verdicts = async {
        loop {
            let (reply, answer) = oneshot::channel();
            let asked = queries.send(Query::Counts(reply)).await.is_ok();
            if !asked || answer.await.is_ok_and(|overview| overview.adding == 0) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let adds_done = tokio::time::timeout_at(until, verdicts).await.is_ok();
    end.cancel();
    tasks.close();
    let at_least = tokio::time::Instant::now() + Duration::from_millis(200);
    let all_done = tokio::time::timeout_at(until.max(at_least), tasks.wait())
        .await
        .is_ok();
    if !adds_done || !all_done {
        tracing::warn!(grace = ?GRACE, "requests under way were cut off");
    }
}

/// The sockets for ztunnel and for Istio's plugin are taken over from whoever has them; that is how a node is moved from
/// Istio's agent to us. The others are ours alone.
async fn bind(config: &Config, zds: &Zds) -> Result<Listeners, StartError> {
    let run = &config.run;
    let tcp = match config.listen {
        None => None,
        Some(address) => Some(listen(address).await?),
    };
    let compatibility = match config.istio_cni {
        None => None,
        Some(mode) => Some(KeptListener::bind(&run.compatibility_socket(), mode)?),
    };
    Ok(Listeners {
        zds: zds.bind()?,
        workload: KeptListener::bind(&run.workload_socket(), 0o660)?,
        http: KeptListener::bind(&run.http_socket(), 0o660)?,
        compatibility,
        tcp,
        node: match config.node {
            None => None,
            Some(_) => Some(KeptListener::bind(&run.node_socket(), 0o660)?),
        },
    })
}

/// The TCP socket for metrics and probes.
pub(crate) async fn listen(address: std::net::SocketAddr) -> Result<TcpListener, StartError> {
    TcpListener::bind(address)
        .await
        .map_err(|source| StartError::Listen {
            address,
            owner: PortOwner::of(address.port()),
            source,
        })
}

struct Feed {
    source: Arc<dyn PodSource>,
    events: mpsc::UnboundedSender<Event>,
    problems: Problems,
    health: Health,
    metrics: Arc<Metrics>,
    executor: Executor,
    tasks: TaskTracker,
    stop: CancellationToken,
    end: CancellationToken,
}

/// Passes on what the source tells; starts the executor's watch when it has told everything.
async fn feed(feed: Feed) {
    let started = Instant::now();
    let mut watching = false;
    loop {
        let mut stream = feed.source.events();
        loop {
            let event = tokio::select! {
                () = feed.stop.cancelled() => return,
                event = stream.next() => event,
            };
            let event = match event {
                None => break,
                Some(SourceEvent::Problem(problem)) => {
                    tracing::warn!(%problem, "problem at the pod source");
                    feed.problems.add(problem);
                    continue;
                }
                Some(SourceEvent::ProblemCleared { place }) => {
                    feed.problems.clear(&place);
                    continue;
                }
                Some(SourceEvent::Synced) => {
                    feed.health.set_synced();
                    feed.metrics.synced(started.elapsed());
                    if !std::mem::replace(&mut watching, true) {
                        let watch = feed.executor.clone().watch(feed.events.clone(), feed.end.clone());
                        feed.tasks.spawn(watch);
                    }
                    Event::SourceSynced
                }
                Some(SourceEvent::PodApplied(pod)) => Event::PodApplied(pod),
                Some(SourceEvent::PodDeleted(pod)) => Event::PodDeleted(pod),
                Some(SourceEvent::NamespaceApplied(namespace)) => Event::NamespaceApplied(namespace),
                Some(SourceEvent::NamespaceDeleted(namespace)) => Event::NamespaceDeleted(namespace),
                Some(SourceEvent::Undetermined(undetermined)) => Event::Undetermined(undetermined),
            };
            let _ = feed.events.send(event);
        }
        tracing::warn!("the pod source has ended; asking it again");
        tokio::select! {
            () = feed.stop.cancelled() => return,
            () = tokio::time::sleep(Duration::from_secs(1)) => {}
        }
    }
}
