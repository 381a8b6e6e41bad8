//! How calls end: as they should, or as a number drawn at random says.

use std::time::Duration;

use sluice_proto::ambient::Desired;
use sluice_proto::code::ErrorCode;
use sluice_proto::id::PodUid;
use sluice_proto::sandbox::Failure;

use super::world::World;
use crate::reconcile::effect::{Effect, Verdict};
use crate::reconcile::event::{ConnectionId, Epoch, Event, Refused, SandboxId};
use crate::reconcile::tests::failure;
use crate::source;

fn broken() -> Failure {
    failure(ErrorCode::Rules)
}

/// `Err` if the call fails.
fn done(fails: bool) -> Result<(), Failure> {
    if fails { Err(broken()) } else { Ok(()) }
}

impl World {
    /// Ends `call`; with `well` 0 it fails, with 1 its answer is lost.
    pub(super) fn answer(&mut self, call: Effect, well: u8) {
        let fails = well == 0;
        let event = match call {
            Effect::Program { id, pod, desired } => self.program(id, pod, desired, well),
            Effect::FetchDescriptor { id, pod, .. } => Event::Fetched {
                id,
                pod,
                result: done(fails),
            },
            Effect::OfferDescriptor { id, pod, .. } => Event::DescriptorOffered {
                id,
                pod,
                result: done(fails),
            },
            Effect::Inspect { id, pod } => Event::Inspected {
                id,
                pod,
                result: done(fails).map(|()| u32::from(well % 3)),
            },
            Effect::Complete { id, pod, verdict } => self.complete(id, pod, &verdict, fails),
            Effect::Adopt { pod, .. } => Event::Adopted {
                pod: pod.uid,
                result: Err(broken()),
            },
            Effect::LetGo { id, pod } => self.let_go(id, pod, fails),
            Effect::SyncProbes { .. } => Event::ProbesSynced(done(fails)),
            Effect::Lookup(pod) => Event::LookedUp {
                pod,
                found: if fails {
                    Err("gone".into())
                } else {
                    Ok(source::Lookup::default())
                },
            },
            Effect::Foresee { call, decided, ask } => Event::Foreseen {
                call,
                result: self.foresee(fails || call <= self.foresee_lost, decided, &ask),
            },
            Effect::ZdsWithdraw { pod, epoch } => Event::ZdsWithdrawn { pod, epoch },
            Effect::ZdsOffer { pod, epoch, to, .. } => {
                let Some(connection) = to.filter(|to| self.connections.iter().any(|(id, _)| id == to)) else {
                    return;
                };
                self.hand_over(connection, pod, epoch, well)
            }
            other => panic!("not a call: {other:?}"),
        };
        self.tell(event);
    }

    fn program(&mut self, id: SandboxId, pod: PodUid, desired: Desired, well: u8) -> Event {
        let result = if !self.lives(&id) {
            Err(Refused::TooLate)
        } else if well == 0 {
            Err(Refused::Failed(broken()))
        } else if well == 1 {
            Err(Refused::Lost(broken()))
        } else {
            self.rules.insert(id.clone(), desired.clone());
            Ok(String::new())
        };
        Event::Programmed {
            id,
            pod,
            desired,
            result,
        }
    }

    fn complete(&mut self, id: SandboxId, pod: PodUid, verdict: &Verdict, fails: bool) -> Event {
        let refused = matches!(verdict, Verdict::Refuse(_));
        let pending = self
            .sandboxes
            .values_mut()
            .find(|sandbox| sandbox.id == id && sandbox.pending);
        let result = match pending {
            None => Err(Refused::TooLate),
            // Refused by us or by the executor: it takes everything back and forgets the sandbox.
            Some(_) if refused || fails => {
                self.del(World::number(&pod));
                if refused {
                    Ok(())
                } else {
                    Err(Refused::Failed(broken()))
                }
            }
            Some(sandbox) => {
                sandbox.pending = false;
                Ok(())
            }
        };
        Event::Completed { id, pod, result }
    }

    fn let_go(&mut self, id: SandboxId, pod: PodUid, fails: bool) -> Event {
        let known = self.lives(&id);
        if known && !fails {
            self.del(World::number(&pod));
        }
        let result = if known && fails {
            Err("mounted".into())
        } else {
            Ok(())
        };
        Event::LetGo { id, pod, result }
    }

    /// What becomes of a workload that was sent on a live connection; with `well` 1 it never answers.
    fn hand_over(&mut self, connection: ConnectionId, pod: PodUid, epoch: Epoch, well: u8) -> Event {
        match well {
            0 => Event::ZdsNacked {
                connection,
                pod,
                epoch,
                error: "no".into(),
            },
            1 => {
                let waited = Duration::from_secs(4);
                self.tell(Event::ZdsExpired {
                    connection,
                    pod,
                    epoch,
                    waited,
                });
                self.connections.retain(|(id, _)| *id != connection);
                self.acks.retain(|(id, ..)| *id != connection);
                Event::ZdsClosed(connection)
            }
            _ => {
                self.acks.insert((connection, World::number(&pod), epoch));
                Event::ZdsAcked {
                    connection,
                    pod,
                    epoch,
                    took: Duration::ZERO,
                    unix_ms: 1,
                }
            }
        }
    }

    /// Everything is answered well until nothing is left to do.
    pub(super) fn quiesce(&mut self) {
        for _ in 0..200 {
            while let Some(call) = self.calls.pop() {
                self.answer(call, 9);
            }
            self.pass(Duration::from_secs(1));
            if self.calls.is_empty() && self.sandboxes.values().all(|sandbox| !sandbox.pending) {
                return;
            }
        }
    }
}
