//! The error document of a plugin (CNI spec section 5), checked against what every message must hold.

use anyhow::Context;
use serde::Deserialize;
use sluice_testkit::cni::Execution;

/// Longest `msg` in characters.
pub const MAX_MSG: usize = 256;

/// What a failed plugin printed.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CniError {
    /// Version of the specification.
    pub cni_version: String,
    /// CNI's error number.
    pub code: u32,
    /// For people.
    pub msg: String,
    /// Stable code, what to do, and the full names.
    pub details: String,
}

impl CniError {
    /// The error of an execution that failed; one that succeeded, or printed anything else, is an error.
    pub fn of(execution: &Execution) -> anyhow::Result<Self> {
        anyhow::ensure!(!execution.status.success(), "succeeded: {}", execution.stdout);
        let error: Self = serde_json::from_str(&execution.stdout)
            .with_context(|| format!("stdout {:?}, stderr {:?}", execution.stdout, execution.stderr))?;
        anyhow::ensure!(error.msg.chars().count() <= MAX_MSG, "too long: {}", error.msg);
        Ok(error)
    }

    /// The stable code at the start of `details`.
    pub fn stable_code(&self) -> &str {
        self.details.split(':').next().unwrap_or_default()
    }

    /// Asserts stable code and component, and that stage, cause and pod are told.
    ///
    /// # Panics
    /// If something is missing.
    pub fn assert(&self, code: &str, component: &str, pod: &str) {
        assert_eq!(self.stable_code(), code, "{self:?}");
        let rest = self.msg.strip_prefix(&format!("sluice: {component}: "));
        let rest = rest.unwrap_or_else(|| panic!("no component {component} in {:?}", self.msg));
        let (stage, cause) = rest
            .split_once(": ")
            .unwrap_or_else(|| panic!("no stage in {:?}", self.msg));
        assert!(!stage.is_empty() && !cause.is_empty(), "{self:?}");
        assert!(self.msg.contains(&format!("(pod {pod})")), "{self:?}");
        assert!(
            self.details.len() > code.len() + 10,
            "nothing to do in {:?}",
            self.details
        );
    }
}
