//! What the ZDS connections tell.

use std::time::Duration;

use sluice_proto::code::ErrorCode;
use sluice_proto::id::PodUid;
use sluice_proto::sandbox::Failure;

use super::State;
use super::effect::Effect;
use super::event::{ConnectionId, Epoch, Event};
use super::pod::{Answer, Offer, Pod};
use super::world::World;

/// First pause before a workload is offered again that made ztunnel hang.
const EXPIRED_FIRST: Duration = Duration::from_secs(5);

impl State {
    pub(super) fn zds(&mut self, event: Event) {
        match event {
            Event::ZdsConnected(connection) => {
                self.world.connections.insert(connection, false);
            }
            Event::ZdsReady {
                connection,
                acked,
                unix_ms,
            } => {
                // Closed meanwhile: a connection that is not known does not become ready.
                let Some(ready) = self.world.connections.get_mut(&connection) else {
                    return;
                };
                *ready = true;
                for (uid, epoch) in acked {
                    if let Some(pod) = self.pods.get_mut(&uid)
                        && pod.offer == Offer::On(epoch)
                    {
                        pod.answers.insert(connection, Answer::Acked { unix_ms });
                    }
                }
                self.advance_all();
            }
            Event::ZdsAcked {
                connection,
                pod,
                epoch,
                took,
                unix_ms,
            } => self.of_offer(connection, &pod, epoch, |world, pod| {
                let before = pod.answers.insert(connection, Answer::Acked { unix_ms });
                if let Some(Answer::Awaited { since }) = before {
                    for (stage, elapsed) in [("handoff", world.now - since), ("ack", took)] {
                        pod.timed(stage, elapsed);
                        world.emit(Effect::Timed { stage, elapsed });
                    }
                }
            }),
            Event::ZdsNacked {
                connection,
                pod,
                epoch,
                error,
            } => self.of_offer(connection, &pod, epoch, |world, pod| {
                world.nacked(pod, connection, &error);
            }),
            Event::ZdsExpired {
                connection,
                pod,
                epoch,
                waited,
            } => self.of_offer(connection, &pod, epoch, |world, pod| world.expired(pod, waited)),
            Event::ZdsClosed(connection) => {
                self.world.connections.remove(&connection);
                for pod in self.pods.values_mut() {
                    pod.answers.remove(&connection);
                }
                self.advance_all();
            }
            Event::ZdsWithdrawn { pod, epoch } => self.with(&pod, |_, pod| {
                if pod.offer == Offer::Withdrawing(epoch) {
                    pod.offer = Offer::Off;
                }
            }),
            _ => {}
        }
    }

    /// An answer to the pod's current offer on a connection that lives.
    fn of_offer(
        &mut self,
        connection: ConnectionId,
        uid: &PodUid,
        epoch: Epoch,
        change: impl FnOnce(&mut World, &mut Pod),
    ) {
        if !self.world.connections.contains_key(&connection) {
            return;
        }
        self.with(uid, |world, pod| {
            if pod.offer == Offer::On(epoch) {
                change(world, pod);
            }
        });
    }
}

impl World {
    fn nacked(&mut self, pod: &mut Pod, connection: ConnectionId, error: &str) {
        let serving = self.proxy().is_none_or(|proxy| proxy == connection);
        let again = self.now + self.jitter.spread(self.settings.nack_retry);
        pod.answers.insert(connection, Answer::Nacked { again });
        if !serving {
            return;
        }
        let failure = Failure::new(
            ErrorCode::ProxyNack,
            "ztunnel",
            "start proxy in the pod",
            explain(error),
        );
        if pod.pending_add().is_some() {
            self.refuse(pod, failure);
            return;
        }
        let pace = self.settings.nack_retry;
        self.failed_for(pod, "proxy-nack", failure, pace, pace);
        if let Some(current) = pod.current.as_mut() {
            current.undo = !current.established;
        }
        if pod.usable().is_some_and(|current| current.established) {
            // ztunnel keeps trying by itself; the next offer only asks how it went.
            pod.backoff.hurry();
        }
    }

    fn expired(&mut self, pod: &mut Pod, waited: Duration) {
        let cause = format!(
            "uid {}: no answer for {:.1} s",
            pod.reference.uid,
            waited.as_secs_f64()
        );
        let failure = Failure::new(
            ErrorCode::ProxyTimeout,
            super::COMPONENT,
            "waiting for ztunnel ack",
            cause,
        );
        if pod.pending_add().is_some() {
            self.refuse(pod, failure);
            return;
        }
        // Out of the next snapshot, or it would hang at the same place.
        self.withdraw(pod);
        let longest = self.settings.expired_retry;
        self.failed_for(pod, "proxy-timeout", failure, EXPIRED_FIRST, longest);
        if let Some(current) = pod.current.as_mut() {
            current.undo = !current.established;
        }
    }
}

/// ztunnel's words, cut, with a hint where they are known to mean that IPv6 is switched off.
fn explain(error: &str) -> String {
    let mut text: String = error.chars().take(200).collect();
    let family = [
        "::1",
        "[::]",
        "Cannot assign requested address",
        "Address family not supported",
    ];
    if family.iter().any(|sign| error.contains(sign)) {
        text.push_str(" (is sysctl net.ipv6.conf.all.disable_ipv6 set in the pod?)");
    }
    text
}
