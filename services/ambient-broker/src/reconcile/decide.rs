//! Whether a pod is in the mesh, and with which options.

use sluice_proto::ambient::AmbientOptions;
use sluice_proto::id::InterfaceName;
use sluice_selection::{Overrides, Reason};

use super::effect::Level;
use super::pod::Pod;
use super::world::World;
use crate::source;

/// The selection's answer for a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Decision {
    /// How its rules should be; `None`: not in the mesh.
    pub(super) options: Option<AmbientOptions>,
    /// What decided, as a sentence.
    pub(super) text: String,
    /// Annotations with values that are not taken, and why not; empty: none.
    pub(super) ignored: String,
}

impl World {
    /// Decides anew whether the pod is in the mesh; tells of annotations that are ignored.
    pub(super) fn decide(&mut self, pod: &mut Pod) {
        let Some(object) = pod.object.clone() else {
            pod.decision = None;
            return;
        };
        let namespace = self.namespaces.get(&object.id.namespace).cloned();
        let mut view = object.view();
        // A phase that ended is handled apart: a sandbox that is being added makes an old phase meaningless.
        view.phase = None;
        let verdict = sluice_selection::select(
            &self.selection,
            &view,
            namespace.as_ref().map(|namespace| namespace.view()),
        );
        pod.lacks_namespace = namespace.is_none() && self.depends_on_namespace(&object, &verdict.reason);
        if pod.lacks_namespace && self.undetermined {
            // What was decided before stays; a pod that was never decided keeps what it has.
            return;
        }
        let options = verdict.is_in().then(|| {
            let overrides = Overrides::<InterfaceName>::parse(&object.annotations);
            let options = AmbientOptions {
                dns_capture: overrides.dns_capture.unwrap_or(self.selection.dns_capture),
                bypass_inbound_capture: overrides.bypass_inbound_capture,
                virtual_interfaces: overrides.virtual_interfaces,
                ipv6: self.selection.ipv6,
                probe_ipv4: self.selection.probe_ipv4,
                probe_ipv6: self.selection.probe_ipv6,
            };
            (options, overrides.warnings)
        });
        let (options, warnings) = options.map_or((None, Vec::new()), |(o, w)| (Some(o), w));
        let ignored: Vec<_> = warnings.iter().map(ToString::to_string).collect();
        let decision = Decision {
            options,
            text: verdict.reason.to_string(),
            ignored: ignored.join("; "),
        };
        let news = pod.decision.as_ref() != Some(&decision);
        if news && !decision.ignored.is_empty() {
            self.log(pod, Level::Warn, "annotation ignored", decision.ignored.clone());
        }
        pod.decision = Some(decision);
    }

    /// The labels of the pod's namespace could make a difference.
    fn depends_on_namespace(&self, object: &source::Pod, reason: &Reason) -> bool {
        let entries = &self.selection.enablement_selectors;
        match reason {
            Reason::ExcludedNamespace { .. }
            | Reason::HostNetwork
            | Reason::Sidecar
            | Reason::Terminal { .. } => false,
            Reason::Selected { entry, .. } => entries
                .get(*entry)
                .is_none_or(|entry| !entry.namespace_selector.is_empty()),
            Reason::OptedOut { .. } | Reason::NotSelected { .. } => entries
                .iter()
                .any(|entry| entry.pod_selector.matches(&object.labels)),
        }
    }
}
