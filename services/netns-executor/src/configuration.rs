//! Whether plugin and broker decide by the same configuration: one has it from the network configuration on the host,
//! the other from its own file, and between the two lies an installer.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The hashes that the two have told last (`SelectionConfig::hash`); empty: nothing told yet.
#[derive(Debug, Default)]
pub struct Configurations(Mutex<Hashes>);

#[derive(Debug, Default)]
struct Hashes {
    plugin: String,
    broker: String,
}

impl Hashes {
    fn differ(&self) -> bool {
        !self.plugin.is_empty() && !self.broker.is_empty() && self.plugin != self.broker
    }
}

impl Configurations {
    fn lock(&self) -> MutexGuard<'_, Hashes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A plugin was called with this configuration.
    pub fn of_plugin(&self, hash: &str) {
        let mut hashes = self.lock();
        if hash.is_empty() || hashes.plugin == hash {
            return;
        }
        hash.clone_into(&mut hashes.plugin);
        tell(&hashes);
    }

    /// A broker watches with this configuration.
    pub fn of_broker(&self, hash: &str) {
        let mut hashes = self.lock();
        if hash.is_empty() || hashes.broker == hash {
            return;
        }
        hash.clone_into(&mut hashes.broker);
        tell(&hashes);
    }

    /// What to tell an operator; empty if there is nothing to tell.
    pub fn mismatch(&self) -> String {
        let hashes = self.lock();
        if hashes.differ() {
            format!(
                "the plugin decides by configuration {}, the broker by {}",
                hashes.plugin, hashes.broker
            )
        } else {
            String::new()
        }
    }
}

fn tell(hashes: &Hashes) {
    let Hashes { plugin, broker } = hashes;
    if hashes.differ() {
        tracing::warn!(plugin, broker, "plugin and broker have different configurations");
    } else {
        tracing::info!(plugin, broker, "configuration");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_told_until_it_is_gone() {
        let configurations = Configurations::default();
        configurations.of_plugin("one");
        assert_eq!(configurations.mismatch(), "", "no broker yet");
        configurations.of_broker("two");
        let told = configurations.mismatch();
        assert!(told.contains("one") && told.contains("two"), "{told}");
        configurations.of_plugin("");
        assert_ne!(
            configurations.mismatch(),
            "",
            "a call without a hash says nothing"
        );
        configurations.of_plugin("two");
        assert_eq!(configurations.mismatch(), "");
    }
}
