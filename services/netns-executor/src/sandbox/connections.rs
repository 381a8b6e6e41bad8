//! Redirections come over a pod that runs, and break none of its connections.
//!
//! A connection that conntrack does not know is taken for a new one at its next packet, and that packet would be
//! redirected. So at first only packets that open a connection are redirected: from then on conntrack sees every packet,
//! and binds those of the connections that there are to no translation. The pod is in the mesh. What was there before, and
//! has been silent since, is then listed and made known; after that every first packet is redirected. Each step is on
//! record before it is made, so after a crash the rest is made up for.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use sluice_proto::ambient::{AmbientOptions, Desired};
use sluice_proto::opener::OpenerRequest;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::Programmed;
use super::task::Task;
use crate::opener_client::OpenerError;

const STAGE: &str = "list connections";

/// A socket that lists connections, asked for and perhaps not there yet.
type Asked = JoinHandle<Result<Vec<OwnedFd>, OpenerError>>;

impl Task {
    /// Programs a namespace in which processes run. The answer goes out once new connections are redirected.
    pub(super) async fn program_running(&mut self, desired: Desired, reply: oneshot::Sender<Programmed>) {
        let joins = match (desired, &self.record.programmed) {
            (Desired::Ambient(options), None | Some(Desired::None | Desired::Joining(_))) => options,
            (Desired::Ambient(options), Some(Desired::Draining(_))) if !self.connections_known => options,
            (desired, _) => {
                let _ = reply.send(self.set(desired).await);
                return;
            }
        };
        let asked = self.ask_for_diagnostics();
        // So that the question is sent before the record is written.
        tokio::task::yield_now().await;
        let outcome = self.set(Desired::Joining(joins.clone())).await;
        let failed = matches!(outcome, Programmed::Failed(_));
        let _ = reply.send(outcome);
        if !failed {
            self.finish_joining(joins, asked).await;
        }
    }

    /// A crash or a failure came in between: all steps again, since none is known to have been made.
    pub(super) async fn join_again(&mut self, options: AmbientOptions) {
        match self.set(Desired::Joining(options.clone())).await {
            Programmed::Failed(failure) => self.set_broken(failure),
            _ => self.finish_joining(options, self.ask_for_diagnostics()).await,
        }
    }

    /// Makes known what is there, and redirects every first packet, whatever became of that: connections that are lost are
    /// a smaller evil than a pod that can be reached past the proxy.
    async fn finish_joining(&mut self, options: AmbientOptions, asked: Asked) {
        self.make_connections_known(asked).await;
        if let Programmed::Failed(failure) = self.set(Desired::Ambient(options)).await {
            // Tried again by the next look.
            self.set_broken(failure);
        }
    }

    /// The opener works while the rules are programmed.
    fn ask_for_diagnostics(&self) -> Asked {
        let (node, netns) = (Arc::clone(&self.node), self.descriptor.clone());
        tokio::spawn(async move {
            let netns = netns.ok_or(OpenerError::NotConnected)?;
            let request = OpenerRequest::Diagnostics;
            node.opener.open(&request, Some(netns.as_fd())).await
        })
    }

    /// Conntrack must see every packet already.
    async fn make_connections_known(&mut self, asked: Asked) {
        // It ends early only with the runtime.
        let asked = asked.await.unwrap_or(Err(OpenerError::NotConnected));
        let tracked = match asked {
            Ok(received) => {
                self.with_netns(STAGE, move |netns| netns.track_connections(received))
                    .await
            }
            Err(error) => Err(error.failure(STAGE)),
        };
        let (attachment, pod) = (&self.record.attachment, &self.record.pod);
        match tracked {
            Ok(tracked) => {
                self.node.metrics.tracked(&tracked);
                self.connections_known = tracked.refused == 0;
                let (made, known, refused) = (tracked.made, tracked.known, tracked.refused);
                if let Some(error) = tracked.reason {
                    tracing::warn!(%attachment, %pod, made, known, refused, error,
                        "some connections of a running pod are not known to conntrack");
                } else {
                    tracing::info!(target: "audit", %attachment, %pod, made, known,
                        "connections of a running pod made known to conntrack");
                }
            }
            Err(failure) => {
                self.node.metrics.unlisted_enrolment();
                tracing::warn!(%attachment, %pod, error = %failure,
                    "connections of a running pod not listed: those that are silent now will be reset");
            }
        }
    }
}
