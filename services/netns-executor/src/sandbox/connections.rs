//! Redirections come over a pod that runs, and break none of its connections.
//!
//! A connection that conntrack does not know is taken for a new one at its next packet, and that packet would be
//! redirected. So the namespace is first programmed as one that leaves the mesh: from then on conntrack sees every packet,
//! and binds what is new to no translation. Whatever was there before, and may have been silent since, is listed and made
//! known. Only then redirections are added. Each step is on record before it is made, so after a crash it is made again.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use sluice_proto::ambient::Desired;
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
    /// Programs a namespace in which processes run. One that shall be drained is answered for as soon as its rules are
    /// there: whoever prepares for the redirections need not wait until the connections are listed, and the
    /// redirections, asked for meanwhile, come after that.
    pub(super) async fn program_running(&mut self, desired: Desired, reply: oneshot::Sender<Programmed>) {
        let begin = match (&desired, &self.record.programmed) {
            (Desired::Ambient(options) | Desired::Draining(options), None | Some(Desired::None)) => {
                Some(Desired::Draining(options.clone()))
            }
            (Desired::Ambient(_), Some(Desired::Draining(_))) if !self.connections_known => None,
            _ => {
                let _ = reply.send(self.set(desired).await);
                return;
            }
        };
        let asked = self.ask_for_diagnostics();
        // So that the question is sent before the record is written.
        tokio::task::yield_now().await;
        let redirects = matches!(desired, Desired::Ambient(_));
        let began = begin.is_some();
        if let Some(begin) = begin {
            let outcome = self.set(begin).await;
            let failed = !matches!(outcome, Programmed::Done { .. });
            if failed || !redirects {
                let _ = reply.send(outcome);
                if !failed {
                    self.make_connections_known(asked, false).await;
                }
                return;
            }
        }
        self.make_connections_known(asked, true).await;
        let outcome = self.set(desired).await;
        if began && matches!(outcome, Programmed::Failed(_)) {
            self.set(Desired::None).await;
        }
        let _ = reply.send(outcome);
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

    /// Conntrack must see every packet already. `is_last`: redirections follow, whatever becomes of this. That connections
    /// are lost then is a smaller evil than a pod that stays out of the mesh.
    async fn make_connections_known(&mut self, asked: Asked, is_last: bool) {
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
            Err(failure) if is_last => {
                self.node.metrics.unlisted_enrolment();
                tracing::warn!(%attachment, %pod, error = %failure,
                    "connections of a running pod not listed: those that are silent now will be reset");
            }
            // Tried again before anything is redirected.
            Err(failure) => {
                tracing::debug!(%attachment, %pod, error = %failure, "connections not listed yet");
            }
        }
    }
}
