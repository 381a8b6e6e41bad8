//! What the broker has decided ahead of time about pods that have no sandbox yet.
//!
//! Asking costs two more wake-ups of sleeping processes, which is most of the time of an ADD outside the mesh, and a
//! good part of one inside.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use sluice_proto::ambient::Desired;
use sluice_proto::id::PodUid;

/// More than a node has pods that wait for their sandbox.
const MOST: usize = 4096;

/// The newest broker's decisions.
///
/// Invariant: a pod is foreseen only while the watch of the broker that said so lasts and no newer broker watches, and
/// until a sandbox of the pod begins. So nothing here outlives the knowledge it rests on, and no pod passes twice by
/// one decision.
#[derive(Debug, Default)]
pub struct Foresight(Mutex<Option<Session>>);

#[derive(Debug)]
struct Session {
    id: u64,
    /// [`Desired::None`]: the pod passes.
    decided: HashMap<PodUid, Desired>,
}

/// The decisions cannot be taken.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotForeseen {
    /// Somebody else watches, or nobody.
    #[error("session {0} is not that of the newest broker that watches")]
    Session(u64),
    /// A broker that foresees without end.
    #[error("more than {MOST} pods are foreseen")]
    TooMany,
}

impl Foresight {
    fn lock(&self) -> MutexGuard<'_, Option<Session>> {
        // Each holder leaves the set whole at every point where it could panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A broker begins to watch; it has foreseen nothing yet.
    pub fn begin(&self, id: u64) {
        let decided = HashMap::new();
        *self.lock() = Some(Session { id, decided });
    }

    /// The watch of a broker has ended.
    pub fn end(&self, id: u64) {
        let mut session = self.lock();
        if session.as_ref().is_some_and(|session| session.id == id) {
            *session = None;
        }
    }

    /// What is decided, and which pods have to be asked about.
    pub fn note(&self, id: u64, decided: Vec<(PodUid, Desired)>, ask: &[PodUid]) -> Result<(), NotForeseen> {
        let mut session = self.lock();
        let session = session
            .as_mut()
            .filter(|session| session.id == id && id != 0)
            .ok_or(NotForeseen::Session(id))?;
        for pod in ask {
            session.decided.remove(pod);
        }
        if session.decided.len() + decided.len() > MOST {
            return Err(NotForeseen::TooMany);
        }
        session.decided.extend(decided);
        Ok(())
    }

    /// How many pods are decided, and how many of them pass.
    pub fn counts(&self) -> (usize, usize) {
        let session = self.lock();
        session.as_ref().map_or((0, 0), |session| {
            let passing = session
                .decided
                .values()
                .filter(|desired| **desired == Desired::None);
            (session.decided.len(), passing.count())
        })
    }

    /// A sandbox of the pod begins: what is decided about it. The decision is used up.
    pub fn take(&self, pod: &PodUid) -> Option<Desired> {
        self.lock().as_mut()?.decided.remove(pod)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uid(text: &str) -> PodUid {
        PodUid::parse(text).unwrap()
    }

    fn pass(text: &str) -> Vec<(PodUid, Desired)> {
        vec![(uid(text), Desired::None)]
    }

    #[test]
    fn a_decision_is_used_up_by_one_sandbox() {
        let foresight = Foresight::default();
        foresight.begin(7);
        foresight.note(7, [pass("a"), pass("b")].concat(), &[]).unwrap();
        assert_eq!(foresight.take(&uid("a")), Some(Desired::None));
        assert_eq!(foresight.take(&uid("a")), None);
        foresight.note(7, vec![], &[uid("b")]).unwrap();
        assert_eq!(foresight.take(&uid("b")), None, "taken back");
    }

    #[test]
    fn a_decision_ends_with_the_watch_and_with_a_newer_broker() {
        let foresight = Foresight::default();
        foresight.begin(7);
        foresight.note(7, pass("a"), &[]).unwrap();
        foresight.begin(8);
        assert_eq!(foresight.take(&uid("a")), None);
        let refused = foresight.note(7, pass("a"), &[]);
        assert_eq!(refused, Err(NotForeseen::Session(7)));
        foresight.note(8, pass("a"), &[]).unwrap();
        foresight.end(7);
        assert!(
            foresight.take(&uid("a")).is_some(),
            "the old one's end is not the new one's"
        );
        foresight.note(8, pass("a"), &[]).unwrap();
        foresight.end(8);
        assert_eq!(foresight.take(&uid("a")), None);
    }

    #[test]
    fn who_names_no_session_foresees_nothing() {
        let foresight = Foresight::default();
        foresight.begin(0);
        assert!(foresight.note(0, pass("a"), &[]).is_err());
    }
}
