//! `preflight`: what the kernel can do.

use sluice_proto::pb::executor::Feature;

use super::{columns, text};

/// A line for each feature that was tried.
pub(crate) fn preflight(features: &[Feature]) -> String {
    if features.is_empty() {
        return "not run yet: the executor was not reached since the broker started\n".to_owned();
    }
    let mut table = columns(&["FEATURE", "FAMILY", "NEEDED", "AVAILABLE", "ERROR"]);
    for feature in features {
        let available = match (feature.available, feature.required) {
            (true, _) => "yes",
            (false, true) => "NO",
            (false, false) => "no",
        };
        let needed = if feature.required { "yes" } else { "no" };
        table.add_row([&feature.name, &feature.family, needed, available, &feature.error]);
    }
    text(table)
}
