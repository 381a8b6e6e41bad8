//! Which mesh pods no proxy has, as the broker told last. Only CHECK asks: nothing else here depends on the proxy.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use sluice_proto::id::PodUid;
use sluice_proto::sandbox::Failure;

/// Why each pod that is not handed over is not. Empty until a broker has told.
#[derive(Debug, Default)]
pub struct Handoffs(Mutex<HashMap<PodUid, Failure>>);

impl Handoffs {
    /// Takes what the broker tells in the place of what it told before.
    pub fn replace(&self, missing: HashMap<PodUid, Failure>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = missing;
    }

    /// Why no proxy has the pod; `None`: one has it, or it needs none.
    pub fn missing(&self, pod: &PodUid) -> Option<Failure> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(pod)
            .cloned()
    }
}
