//! Which Events there are, and their words.

use std::time::{Duration, Instant};

use sluice_proto::id::PodRef;
use sluice_selection::{DATAPLANE_MODE, OwnPods, REDIRECTION_STATUS};
use tokio::sync::watch;

use super::book::Book;
use super::daemon_set::Known;
use super::events::{Note, Recorder};
use super::wire::Owner;
use crate::reconcile::report::PodReport;

/// How often the book is looked through.
const LOOK: Duration = Duration::from_secs(1);

/// A running pod may be out of the mesh this long before people are told.
const PATIENCE: Duration = Duration::from_secs(8);

/// Tells of pods that are not as they should be, for ever.
pub(super) async fn take(book: Book, recorder: Recorder, known: watch::Receiver<Known>, own: OwnPods) {
    loop {
        tokio::time::sleep(LOOK).await;
        for (pod, report) in book.untold(Instant::now(), PATIENCE) {
            recorder.record(not_in_mesh(pod, &report));
        }
        for (pod, ignored) in book.ignored() {
            recorder.record(Note {
                pod,
                reason: "AnnotationIgnored",
                warning: true,
                text: ignored,
            });
        }
        let uid = known.borrow().uid.clone();
        let posing = book.posing(|owner| is_ours(owner, &own, uid.as_deref()));
        for pod in posing {
            recorder.record(not_our_pod(pod, &own));
        }
    }
}

/// Names can be chosen freely, in owner references too; the UID of what exists cannot.
fn is_ours(owner: Option<&Owner>, own: &OwnPods, uid: Option<&str>) -> bool {
    owner.is_some_and(|owner| {
        owner.kind == "DaemonSet" && owner.name == own.daemon_set && uid.is_some_and(|uid| uid == owner.uid)
    })
}

fn not_in_mesh(pod: PodRef, report: &PodReport) -> Note {
    let text = match &report.last_error {
        Some(failure) => format!("not in the mesh: {failure}; {}", failure.code.fix()),
        None => format!(
            "not in the mesh yet ({}): {}; see `sluicectl explain`",
            report.reason, report.verdict
        ),
    };
    Note {
        pod,
        reason: "NotInMesh",
        warning: true,
        text,
    }
}

/// Somebody takes the status for a setting.
pub(super) fn not_a_setting(pod: &PodRef) -> Note {
    Note {
        pod: pod.clone(),
        reason: "StatusAnnotationCorrected",
        warning: true,
        text: format!(
            "annotation {REDIRECTION_STATUS} says how the pod stands and was put right; to put a pod into the mesh or \
             out of it, set label {DATAPLANE_MODE} to \"ambient\" or \"none\" on the pod or its namespace"
        ),
    }
}

/// On the agent's own pod.
pub(super) fn installer_not_ready(pod: PodRef, problem: &str) -> Note {
    Note {
        pod,
        reason: "NetworkConfiguration",
        warning: true,
        text: format!("the installer is not ready: {problem}; see `sluicectl status`"),
    }
}

fn not_our_pod(pod: PodRef, own: &OwnPods) -> Note {
    Note {
        pod,
        reason: "NameOfNodeAgent",
        warning: true,
        text: format!(
            "the pod is named like those of DaemonSet {}/{} but does not belong to it: it started outside of the mesh \
             and was enrolled while running; give it another name",
            own.namespace, own.daemon_set
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_daemon_sets_own_uid_counts() {
        let own = OwnPods {
            namespace: "sluice-system".into(),
            daemon_set: "sluice-node".into(),
        };
        let owner = |kind: &str, name: &str, uid: &str| Owner {
            kind: kind.into(),
            name: name.into(),
            uid: uid.into(),
            controller: true,
        };
        assert!(is_ours(
            Some(&owner("DaemonSet", "sluice-node", "d")),
            &own,
            Some("d")
        ));
        for (other, uid) in [
            (Some(owner("DaemonSet", "sluice-node", "forged")), Some("d")),
            (Some(owner("DaemonSet", "other", "d")), Some("d")),
            (Some(owner("ReplicaSet", "sluice-node", "d")), Some("d")),
            (Some(owner("DaemonSet", "sluice-node", "d")), None),
            (None, Some("d")),
        ] {
            assert!(!is_ours(other.as_ref(), &own, uid), "{other:?}");
        }
    }
}
