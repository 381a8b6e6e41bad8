//! What the broker has decided ahead of time: pods outside the mesh, which pass as soon as their ADD comes.
//!
//! Most pods of a node may be outside the mesh; asking about each costs two more wake-ups of sleeping processes.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

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
    passing: HashSet<PodUid>,
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
        let passing = HashSet::new();
        *self.lock() = Some(Session { id, passing });
    }

    /// The watch of a broker has ended.
    pub fn end(&self, id: u64) {
        let mut session = self.lock();
        if session.as_ref().is_some_and(|session| session.id == id) {
            *session = None;
        }
    }

    /// Pods that pass, and pods that have to be asked about.
    pub fn note(&self, id: u64, pass: Vec<PodUid>, ask: &[PodUid]) -> Result<(), NotForeseen> {
        let mut session = self.lock();
        let session = session
            .as_mut()
            .filter(|session| session.id == id && id != 0)
            .ok_or(NotForeseen::Session(id))?;
        for pod in ask {
            session.passing.remove(pod);
        }
        if session.passing.len() + pass.len() > MOST {
            return Err(NotForeseen::TooMany);
        }
        session.passing.extend(pass);
        Ok(())
    }

    /// How many pods pass.
    #[expect(clippy::len_without_is_empty, reason = "a figure for people")]
    pub fn len(&self) -> usize {
        self.lock().as_ref().map_or(0, |session| session.passing.len())
    }

    /// A sandbox of the pod begins: whether it passes. The decision is used up.
    pub fn take(&self, pod: &PodUid) -> bool {
        self.lock()
            .as_mut()
            .is_some_and(|session| session.passing.remove(pod))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uid(text: &str) -> PodUid {
        PodUid::parse(text).unwrap()
    }

    #[test]
    fn a_decision_is_used_up_by_one_sandbox() {
        let foresight = Foresight::default();
        foresight.begin(7);
        foresight.note(7, vec![uid("a"), uid("b")], &[]).unwrap();
        assert!(foresight.take(&uid("a")));
        assert!(!foresight.take(&uid("a")));
        foresight.note(7, vec![], &[uid("b")]).unwrap();
        assert!(!foresight.take(&uid("b")), "taken back");
    }

    #[test]
    fn a_decision_ends_with_the_watch_and_with_a_newer_broker() {
        let foresight = Foresight::default();
        foresight.begin(7);
        foresight.note(7, vec![uid("a")], &[]).unwrap();
        foresight.begin(8);
        assert!(!foresight.take(&uid("a")));
        let refused = foresight.note(7, vec![uid("a")], &[]);
        assert_eq!(refused, Err(NotForeseen::Session(7)));
        foresight.note(8, vec![uid("a")], &[]).unwrap();
        foresight.end(7);
        assert!(
            foresight.take(&uid("a")),
            "the old one's end is not the new one's"
        );
        foresight.note(8, vec![uid("a")], &[]).unwrap();
        foresight.end(8);
        assert!(!foresight.take(&uid("a")));
    }

    #[test]
    fn who_names_no_session_foresees_nothing() {
        let foresight = Foresight::default();
        foresight.begin(0);
        assert!(foresight.note(0, vec![uid("a")], &[]).is_err());
    }
}
