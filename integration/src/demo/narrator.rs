//! Tells what happens, as it happens: plain words, the time since the step began, and a verdict for each observation.
//! What it is given to say must come from a measurement.

use std::fmt::Display;
use std::io::{self, Write};
use std::time::{Duration, Instant};

/// Column the text of observations is wrapped at.
const WIDTH: usize = 116;

/// One line of the summary.
#[derive(Debug)]
struct Row {
    title: &'static str,
    seen: String,
    held: bool,
    took: Duration,
}

/// The teller.
#[derive(Debug)]
pub(super) struct Narrator {
    began: Instant,
    rows: Vec<Row>,
}

/// The step being told.
#[derive(Debug)]
pub(super) struct Step {
    began: Instant,
    held: bool,
    observations: usize,
    summary: Vec<String>,
}

/// The text goes to stdout: it is what the demo is for. A closed stdout ends the telling, not the demo.
pub(super) fn say(text: &str) {
    let _ = writeln!(io::stdout().lock(), "{text}");
}

/// Shows the output of a program as it is.
pub(super) fn show(text: &str) {
    text.lines().for_each(|line| say(&format!("{:15}{line}", "")));
}

impl Default for Narrator {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            rows: Vec::new(),
        }
    }
}

impl Narrator {
    /// Tells a step. An error ends the step and counts as not held; `None` then.
    pub(super) fn step<T>(
        &mut self,
        title: &'static str,
        about: &str,
        run: impl FnOnce(&mut Step) -> anyhow::Result<T>,
    ) -> Option<T> {
        say(&format!("\n{}. {title}", self.rows.len() + 1));
        for line in wrap(about, WIDTH - 3) {
            say(&format!("   {line}"));
        }
        let mut step = Step {
            began: Instant::now(),
            held: true,
            observations: 0,
            summary: Vec::new(),
        };
        let outcome = run(&mut step);
        if let Err(error) = &outcome {
            step.saw(false, format!("the step could not go on: {error:#}"));
            step.summary.push(format!("{error:#}"));
        }
        let held = step.held && step.observations > 0;
        self.rows.push(Row {
            title,
            seen: step.summary.join("; "),
            held,
            took: step.began.elapsed(),
        });
        outcome.ok()
    }

    /// Whether everything held so far.
    pub(super) fn all_held(&self) -> bool {
        !self.rows.is_empty() && self.rows.iter().all(|row| row.held)
    }

    /// The table at the end.
    pub(super) fn summary(&self) {
        let title_width = self
            .rows
            .iter()
            .map(|row| row.title.chars().count())
            .max()
            .unwrap_or(0);
        let seen_width = WIDTH.saturating_sub(title_width + 20).max(30);
        say(&format!(
            "\n{:<title_width$}  {:<seen_width$}  {:>7}  held",
            "step", "observed", "took"
        ));
        say(&"-".repeat(title_width + seen_width + 17));
        for row in &self.rows {
            let mut lines = wrap(&row.seen, seen_width).into_iter();
            let first = lines.next().unwrap_or_default();
            let held = if row.held { "yes" } else { "NO" };
            say(&format!(
                "{:<title_width$}  {first:<seen_width$}  {:>6.1}s  {held}",
                row.title,
                row.took.as_secs_f64()
            ));
            for line in lines {
                say(&format!("{:<title_width$}  {line}", ""));
            }
        }
        let held = self.rows.iter().filter(|row| row.held).count();
        say(&format!(
            "\n{held} of {} steps held, {:.0} s in all.",
            self.rows.len(),
            self.began.elapsed().as_secs_f64()
        ));
    }
}

impl Step {
    /// Says what is about to be done.
    pub(super) fn does(&self, text: impl Display) {
        self.print("   ", &text.to_string());
    }

    /// Says what was measured, without a verdict.
    pub(super) fn notes(&self, text: impl Display) {
        self.print(" - ", &text.to_string());
    }

    /// Says what was measured and whether it is as it should be.
    pub(super) fn saw(&mut self, held: bool, text: impl Display) {
        self.observations += 1;
        self.held &= held;
        self.print(if held { "ok " } else { "NO " }, &text.to_string());
    }

    /// Adds to this step's line of the summary.
    pub(super) fn sums_up(&mut self, text: impl Into<String>) {
        self.summary.push(text.into());
    }

    fn print(&self, mark: &str, text: &str) {
        let at = format!("{:>9}", format!("{:.1} ms", ms(self.began.elapsed())));
        let mut lines = wrap(text, WIDTH - 19).into_iter();
        say(&format!("   {at}  {mark} {}", lines.next().unwrap_or_default()));
        for line in lines {
            say(&format!("{:19}{line}", ""));
        }
    }
}

/// A duration in milliseconds.
pub(super) fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    for paragraph in text.lines() {
        let mut line = String::new();
        for word in paragraph.split(' ') {
            if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > width {
                lines.push(std::mem::take(&mut line));
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
        lines.push(line);
    }
    lines
}
