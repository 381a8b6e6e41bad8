//! What the source tells: pods and namespaces that come, change and go, and answers to look-ups.

use std::sync::Arc;
use std::time::Duration;

use sluice_proto::id::{Namespace, PodRef, PodUid};
use sluice_selection::REDIRECTION_STATUS;

use super::effect::Level;
use super::pod::Pod;
use super::world::World;
use super::{State, report};
use crate::source;

impl State {
    pub(super) fn pod_applied(&mut self, object: Arc<source::Pod>) {
        let Ok(uid) = PodUid::parse(object.sandbox_uid()) else {
            return;
        };
        let mut reference = object.id.clone();
        reference.uid = uid.clone();
        let pod = self
            .pods
            .entry(uid.clone())
            .or_insert_with(|| Pod::new(reference.clone()));
        if let Some(known) = &pod.object
            && (known.id.namespace != object.id.namespace || known.id.name != object.id.name)
        {
            let details = format!("{reference} claims uid {uid}, which belongs to {}", pod.reference);
            self.world.log(pod, Level::Warn, "pod ignored", details);
            return;
        }
        let first = pod.object.is_none();
        pod.reference = reference;
        let enabled = object.annotations.get(REDIRECTION_STATUS).map(String::as_str) == Some("enabled");
        if first {
            pod.status = enabled;
        }
        pod.object = Some(object);
        self.with(&uid, |world, pod| {
            world.decide(pod);
            if let Some(add) = pod.pending_add() {
                add.look.hurry();
            }
        });
    }

    pub(super) fn pod_deleted(&mut self, object: &source::Pod) {
        let Ok(uid) = PodUid::parse(object.sandbox_uid()) else {
            return;
        };
        self.with(&uid, |_, pod| {
            let same = |known: &Arc<source::Pod>| known.id == object.id;
            if pod.object.as_ref().is_some_and(same) {
                pod.object = None;
                pod.decision = None;
                pod.problem = None;
                pod.backoff.reset();
                pod.status = false;
            }
        });
    }

    /// Decides about pods whose namespace is not known, now that more or less can be said of it.
    pub(super) fn undetermined(&mut self, undetermined: bool) {
        self.world.undetermined = undetermined;
        self.world.absent.clear();
        let lacking = self.pods.values().filter(|pod| pod.lacks_namespace);
        let uids: Vec<_> = lacking.map(|pod| pod.reference.uid.clone()).collect();
        for uid in uids {
            self.with(&uid, World::decide);
        }
    }

    pub(super) fn namespace_changed(&mut self, name: &Namespace, namespace: Option<Arc<source::Namespace>>) {
        self.world.absent.clear();
        match namespace {
            Some(namespace) => self.world.namespaces.insert(name.clone(), namespace),
            None => self.world.namespaces.remove(name),
        };
        let members: Vec<_> = self
            .pods
            .values()
            .filter(|pod| pod.reference.namespace == *name)
            .map(|pod| pod.reference.uid.clone())
            .collect();
        for uid in members {
            self.with(&uid, World::decide);
        }
    }

    pub(super) fn looked_up(&mut self, pod: &PodRef, found: Result<source::Lookup, String>) {
        let mut error = None;
        let mut hit = false;
        match found {
            Ok(lookup) => {
                match lookup.namespace {
                    Some(namespace) if self.world.namespaces.get(&pod.namespace) != Some(&namespace) => {
                        self.namespace_changed(&pod.namespace, Some(namespace));
                    }
                    Some(_) => {}
                    None if lookup.undetermined => error = Some(report::undetermined(&pod.namespace)),
                    None => {
                        self.world.absent.insert(pod.namespace.clone());
                    }
                }
                match lookup.pod {
                    Some(object) if object.sandbox_uid() == pod.uid.as_str() => {
                        hit = error.is_none();
                        self.pod_applied(object);
                    }
                    Some(object) => {
                        error = Some(format!("its pod of that name has uid {}", object.sandbox_uid()));
                    }
                    None => {}
                }
            }
            Err(cause) => error = Some(cause),
        }
        self.with(&pod.uid.clone(), |world, pod| {
            let now = world.now;
            let Some(add) = pod.pending_add() else { return };
            add.looking = false;
            add.found |= hit;
            add.look_error = error;
            if !hit {
                let (first, longest) = (Duration::from_millis(20), Duration::from_millis(250));
                add.look.failed(now, first, longest, &mut world.jitter);
            }
        });
    }
}
