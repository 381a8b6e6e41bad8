//! The decision itself, with every check it made on the way.

use std::fmt;

use serde::Serialize;

use crate::labels::Requirement;
use crate::{EnablementSelector, Labels, NamespaceView, PodView, SIDECAR_STATUS, SelectionConfig};

/// Whether a pod is in the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Redirected to the node's proxy.
    In,
    /// Left alone.
    Out,
}

/// What decided. Displays as a sentence for operators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reason {
    /// The namespace is excluded by configuration.
    ExcludedNamespace {
        /// The namespace's name.
        namespace: String,
    },
    /// The pod shares the host's network namespace.
    HostNetwork,
    /// A sidecar was injected into the pod.
    Sidecar,
    /// The pod's containers have ended for good.
    Terminal {
        /// `status.phase`.
        phase: &'static str,
    },
    /// An enablement selector matches.
    Selected {
        /// Which, from 0.
        entry: usize,
        /// The labels that made it match.
        by: String,
    },
    /// No enablement selector matches, and the pod's own label is what keeps it out: its namespace is in.
    OptedOut {
        /// The selector whose namespace part matched, from 0.
        entry: usize,
        /// The pod's label that keeps it out.
        by: String,
        /// What the selector requires.
        requires: String,
    },
    /// No enablement selector matches.
    NotSelected {
        /// For each selector, what it misses.
        missing: Vec<String>,
    },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ExcludedNamespace { namespace } => {
                write!(f, "namespace {namespace} is excluded by configuration")
            }
            Self::HostNetwork => f.write_str("the pod uses the host's network (spec.hostNetwork)"),
            Self::Sidecar => write!(f, "the pod has a sidecar (annotation {SIDECAR_STATUS})"),
            Self::Terminal { phase } => write!(f, "the pod has ended (phase {phase})"),
            Self::Selected { entry, by } => write!(f, "{by} (selector {})", entry + 1),
            Self::OptedOut { entry, by, requires } => {
                write!(
                    f,
                    "{by} keeps the pod out: selector {} requires {requires}",
                    entry + 1
                )
            }
            Self::NotSelected { missing } if missing.is_empty() => {
                f.write_str("no enablement selector is configured")
            }
            Self::NotSelected { missing } => {
                write!(f, "no enablement selector matches: {}", missing.join("; "))
            }
        }
    }
}

impl Serialize for Reason {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// One check on the way to a verdict.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Step {
    /// What was looked at.
    pub check: String,
    /// What was found.
    pub observed: String,
    /// This check decided; no other was made after it.
    pub decides: bool,
}

/// A decision and how it came about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[must_use]
pub struct Verdict {
    /// In or out.
    pub mode: Mode,
    /// What decided.
    pub reason: Reason,
    /// Every check made, in order; the last one decided.
    pub steps: Vec<Step>,
}

impl Verdict {
    /// The pod is in the mesh.
    pub fn is_in(&self) -> bool {
        self.mode == Mode::In
    }
}

/// Decides whether a pod is in the mesh. The first check that rejects wins; then any enablement selector suffices.
///
/// `namespace` is `None` when nothing is known of the pod's namespace; it is then decided as if it had no
/// labels. A caller that can find out should do so first.
pub fn select(config: &SelectionConfig, pod: &PodView<'_>, namespace: Option<NamespaceView<'_>>) -> Verdict {
    let mut trail = Trail { steps: Vec::new() };
    if let Some(reason) = rejection(config, pod, &mut trail) {
        return trail.verdict(Mode::Out, reason);
    }
    let none = Labels::new();
    let namespace_labels = if let Some(view) = namespace {
        view.labels
    } else {
        trail.note(
            "namespace",
            format!(
                "nothing known of {}; decided as if it had no labels",
                pod.namespace
            ),
        );
        &none
    };
    let (mode, reason) = selection(config, pod.labels, namespace_labels, &mut trail);
    trail.verdict(mode, reason)
}

/// The checks that keep a pod out whatever the selectors say.
fn rejection(config: &SelectionConfig, pod: &PodView<'_>, trail: &mut Trail) -> Option<Reason> {
    trail.note(
        "excluded namespaces",
        format!(
            "{} not in [{}]",
            pod.namespace,
            config.excluded_namespaces.join(", ")
        ),
    );
    if config.excludes(pod.namespace) {
        trail.observed(format!("{} is listed", pod.namespace));
        return Some(Reason::ExcludedNamespace {
            namespace: pod.namespace.into(),
        });
    }
    trail.note("spec.hostNetwork", pod.host_network.to_string());
    if pod.host_network {
        return Some(Reason::HostNetwork);
    }
    let sidecar = pod.annotations.contains_key(SIDECAR_STATUS);
    trail.note(
        format!("annotation {SIDECAR_STATUS}"),
        if sidecar { "present" } else { "absent" },
    );
    if sidecar {
        return Some(Reason::Sidecar);
    }
    if let Some(phase) = pod.phase {
        trail.note("status.phase", phase.as_str());
        if phase.is_terminal() {
            return Some(Reason::Terminal {
                phase: phase.as_str(),
            });
        }
    }
    None
}

fn selection(
    config: &SelectionConfig,
    pod: &Labels,
    namespace: &Labels,
    trail: &mut Trail,
) -> (Mode, Reason) {
    let mut opted_out = None;
    let mut missing = Vec::new();
    for (entry, selector) in config.enablement_selectors.iter().enumerate() {
        let check = format!("selector {}", entry + 1);
        let Some(unmet) = unmet(selector, pod, namespace) else {
            let by = matched_by(selector, pod, namespace);
            trail.note(check, format!("matches: {by}"));
            return (Mode::In, Reason::Selected { entry, by });
        };
        let observed = unmet.requirement.observed(unmet.whose, unmet.labels);
        let lacks = format!(
            "requires {} label {}, found {observed}",
            unmet.whose, unmet.requirement
        );
        trail.note(check, lacks.clone());
        missing.push(format!("selector {} {lacks}", entry + 1));
        if unmet.whose == "pod" && !selector.namespace_selector.is_empty() && opted_out.is_none() {
            opted_out = Some(Reason::OptedOut {
                entry,
                by: observed,
                requires: unmet.requirement.to_string(),
            });
        }
    }
    if config.enablement_selectors.is_empty() {
        trail.note("enablement selectors", "none configured");
    }
    (Mode::Out, opted_out.unwrap_or(Reason::NotSelected { missing }))
}

/// A requirement that is not met, and on whom.
struct Unmet<'a> {
    whose: &'static str,
    requirement: &'a Requirement,
    labels: &'a Labels,
}

fn unmet<'a>(selector: &'a EnablementSelector, pod: &'a Labels, namespace: &'a Labels) -> Option<Unmet<'a>> {
    let parts = [
        ("namespace", &selector.namespace_selector, namespace),
        ("pod", &selector.pod_selector, pod),
    ];
    parts.into_iter().find_map(|(whose, selector, labels)| {
        selector.first_unmet(labels).map(|requirement| Unmet {
            whose,
            requirement,
            labels,
        })
    })
}

/// The labels that made an entry match: those that are there; an absence only where nothing else decided.
fn matched_by(selector: &EnablementSelector, pod: &Labels, namespace: &Labels) -> String {
    let parts = [
        ("namespace", &selector.namespace_selector, namespace),
        ("pod", &selector.pod_selector, pod),
    ];
    let describe = |present: bool| -> Vec<String> {
        parts
            .iter()
            .flat_map(|(whose, selector, labels)| {
                selector
                    .requirements()
                    .iter()
                    .filter(|requirement| labels.contains_key(&requirement.key) == present)
                    .map(|requirement| requirement.observed(whose, labels))
            })
            .collect()
    };
    let present = describe(true);
    let terms = if present.is_empty() {
        describe(false)
    } else {
        present
    };
    if terms.is_empty() {
        "the selector matches every pod".into()
    } else {
        terms.join(" and ")
    }
}

/// The checks made so far.
struct Trail {
    steps: Vec<Step>,
}

impl Trail {
    fn note(&mut self, check: impl Into<String>, observed: impl Into<String>) {
        self.steps.push(Step {
            check: check.into(),
            observed: observed.into(),
            decides: false,
        });
    }

    fn observed(&mut self, observed: String) {
        if let Some(step) = self.steps.last_mut() {
            step.observed = observed;
        }
    }

    fn verdict(mut self, mode: Mode, reason: Reason) -> Verdict {
        if let Some(step) = self.steps.last_mut() {
            step.decides = true;
        }
        Verdict {
            mode,
            reason,
            steps: self.steps,
        }
    }
}
