//! The table.

use std::io::{self, Write};
use std::path::Path;

use anyhow::Context;
use serde::Serialize;

#[derive(Debug, Clone, Serialize)]
struct Row {
    subject: String,
    value: f64,
    unit: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    floor: Option<Floor>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<f64>,
    /// Of the ratio if there is a floor, else of the value.
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    held: Option<bool>,
}

#[derive(Debug, Clone, Serialize)]
struct Floor {
    name: &'static str,
    value: f64,
}

/// What was measured so far.
#[derive(Debug, Default)]
pub(super) struct Report {
    rows: Vec<Row>,
}

/// The table goes to stdout: it is what the benchmark is for.
fn say(text: &str) {
    let _ = writeln!(io::stdout().lock(), "{text}");
}

impl Report {
    /// A value that must not exceed `target` times its floor.
    pub(super) fn against(
        &mut self,
        subject: &str,
        value: f64,
        floor: (&'static str, f64),
        target: f64,
        unit: &'static str,
    ) {
        let ratio = value / floor.1;
        self.push(Row {
            subject: subject.to_owned(),
            value,
            unit,
            floor: Some(Floor {
                name: floor.0,
                value: floor.1,
            }),
            ratio: Some(ratio),
            target: Some(target),
            held: Some(ratio <= target),
        });
    }

    /// A value that must not exceed `target`.
    pub(super) fn bound(&mut self, subject: &str, value: f64, unit: &'static str, target: f64) {
        let (held, subject) = (Some(value <= target), subject.to_owned());
        self.push(Row {
            subject,
            value,
            unit,
            floor: None,
            ratio: None,
            target: Some(target),
            held,
        });
    }

    /// A value without a target.
    pub(super) fn inform(&mut self, subject: &str, value: f64, unit: &'static str) {
        self.push(Row {
            subject: subject.to_owned(),
            value,
            unit,
            floor: None,
            ratio: None,
            target: None,
            held: None,
        });
    }

    fn push(&mut self, row: Row) {
        say(&row.line());
        self.rows.push(row);
    }

    pub(super) fn all_held(&self) -> bool {
        !self.rows.is_empty() && self.rows.iter().all(|row| row.held != Some(false))
    }

    pub(super) fn print_table(&self) {
        let head = ["value", "floor", "ratio", "target", "held"];
        say(&format!(
            "\n{:<58} {:>12} {:>25} {:>7} {:>9}  {}",
            "subject", head[0], head[1], head[2], head[3], head[4]
        ));
        say(&"-".repeat(122));
        self.rows.iter().for_each(|row| say(&row.line()));
        let (targets, held) = self
            .rows
            .iter()
            .fold((0, 0), |(targets, held), row| match row.held {
                Some(true) => (targets + 1, held + 1),
                Some(false) => (targets + 1, held),
                None => (targets, held),
            });
        say(&format!("\n{held} of {targets} targets met."));
    }

    pub(super) fn write_json(&self, path: &Path) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(&self.rows)?;
        std::fs::write(path, text + "\n").with_context(|| format!("writing {}", path.display()))
    }
}

impl Row {
    fn line(&self) -> String {
        let floor = self
            .floor
            .as_ref()
            .map_or_else(String::new, |floor| format!("{} {:.3}", floor.name, floor.value));
        let optional = |value: Option<f64>| value.map_or_else(String::new, |value| format!("{value:.2}"));
        let target = match (self.target, self.ratio) {
            (Some(target), None) => format!("{target:.1} {}", self.unit),
            (target, _) => optional(target),
        };
        format!(
            "{:<58} {:>12} {floor:>25} {:>7} {target:>9}  {}",
            self.subject,
            format!("{:.3} {}", self.value, self.unit),
            optional(self.ratio),
            match self.held {
                Some(true) => "yes",
                Some(false) => "NO",
                None => "-",
            }
        )
    }
}
