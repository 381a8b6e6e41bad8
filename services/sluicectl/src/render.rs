//! Tables for people. Pure: everything, the time included, is given.

mod explain;
mod node;
mod pod;
mod preflight;

pub(crate) use explain::explanation;
pub(crate) use node::node;
pub(crate) use pod::{event, pod};
pub(crate) use preflight::preflight;

use std::time::{SystemTime, UNIX_EPOCH};

use comfy_table::{Table, presets::NOTHING};

/// Unix time in milliseconds.
pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// A table with a header line and nothing but space between columns.
fn columns(header: &[&str]) -> Table {
    let mut table = plain();
    table.set_header(header.iter().copied());
    table
}

fn plain() -> Table {
    let mut table = Table::new();
    table.load_preset(NOTHING);
    table
}

/// The table without the space that its last columns end in.
fn text(mut table: Table) -> String {
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    let lines: Vec<String> = table.lines().map(|line| line.trim_end().to_owned()).collect();
    lines.join("\n") + "\n"
}

/// Labels and values, one a line; further lines of a value under its first.
#[derive(Debug, Default)]
struct Facts(Vec<(&'static str, String)>);

impl Facts {
    fn add(&mut self, label: &'static str, value: impl Into<String>) {
        self.0.push((label, value.into()));
    }

    fn add_list(&mut self, label: &'static str, values: &[String], empty: &str) {
        if values.is_empty() {
            self.add(label, empty);
        } else {
            self.add(label, values.join("\n"));
        }
    }

    fn text(self) -> String {
        let mut table = plain();
        for (label, value) in self.0 {
            table.add_row([label, &value]);
        }
        text(table)
    }
}

/// A section with a title and a line for each item; nothing where there are none.
fn list(title: &str, items: &[String]) -> String {
    if items.is_empty() {
        return String::new();
    }
    let lines: String = items.iter().flat_map(|item| ["  ", item, "\n"]).collect();
    format!("\n{title}\n{lines}")
}

/// How long ago, in the largest unit that is not zero.
fn ago(unix_ms: u64, now_ms: u64) -> String {
    let seconds = now_ms.saturating_sub(unix_ms) / 1000;
    match seconds {
        0..120 => format!("{seconds} s ago"),
        120..7200 => format!("{} min ago", seconds / 60),
        7200..172_800 => format!("{} h ago", seconds / 3600),
        _ => format!("{} days ago", seconds / 86_400),
    }
}

/// Microseconds in a unit that people read.
fn duration(microseconds: u64) -> String {
    if microseconds < 1000 {
        format!("{microseconds} us")
    } else {
        format!("{}.{} ms", microseconds / 1000, microseconds % 1000 / 100)
    }
}

fn plural(count: usize, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_told_in_the_largest_unit_that_says_something() {
        let now = 10 * 86_400_000;
        for (seconds, expected) in [
            (0, "0 s ago"),
            (119, "119 s ago"),
            (150, "2 min ago"),
            (9_000, "2 h ago"),
            (300_000, "3 days ago"),
        ] {
            assert_eq!(ago(now - seconds * 1000, now), expected);
        }
        assert_eq!(ago(now + 5000, now), "0 s ago", "clocks differ");
    }
}
