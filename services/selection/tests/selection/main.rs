//! Who is in the mesh, how, and what of the configuration is refused.

mod annotations;
mod configuration;
mod identity;
mod truth_table;

use serde_json::Value;
use sluice_selection::SelectionConfig;

const MODE: &str = "istio.io/dataplane-mode";

#[expect(clippy::unwrap_used, reason = "a configuration of the tests' own")]
fn config(value: Value) -> SelectionConfig {
    serde_json::from_value(value).unwrap()
}
