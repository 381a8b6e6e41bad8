//! A network of our own, beside those of others: whoever delegates (Multus) calls it for the pods that name it, and reads it from
//! a directory that the container runtime does not. No other file is written, renamed or removed.

use super::{FileMode, Plan, Problem, Situation, Step};
use crate::config::STAND_ALONE_FILE;
use crate::edit::ISTIO;
use crate::entry::Layout;

impl Plan {
    pub(super) fn stand_alone(&mut self, situation: &Situation<'_>) {
        let (flags, net) = (situation.flags, situation.net);
        self.effective = None;
        let foreign = net.valid(true).find(|(_, loaded)| loaded.has(ISTIO));
        if let Some((name, _)) = foreign.filter(|_| !flags.take_over) {
            self.problems.push(Problem::ForeignMesh(name.clone()));
            return;
        }
        let directory = flags.host_cni_net_dir.components().as_path();
        let reader = situation
            .runtimes
            .iter()
            .flatten()
            .find(|runtime| runtime.configurations.as_deref() == Some(directory));
        if let Some(runtime) = reader {
            self.problems.push(Problem::RuntimeWouldRead {
                dir: directory.to_owned(),
                file: runtime.file.clone(),
            });
            return;
        }
        if situation.bins.iter().any(|bin| bin.ours.is_err()) {
            // Told already; the plugin may be missing there.
            return;
        }
        let layout = Layout::Lines {
            prefix: String::new(),
            step: "  ".to_owned(),
        };
        let content = match situation.entry.render(&layout) {
            Ok(text) => format!("{text}\n").into_bytes(),
            Err(error) => {
                self.problems.push(Problem::Derive {
                    name: STAND_ALONE_FILE.to_owned(),
                    reason: error.to_string(),
                });
                return;
            }
        };
        let mode = flags.owned_mode();
        let found = net.files.get(STAND_ALONE_FILE);
        let right = found
            .is_some_and(|file| !file.link && file.mode == mode && file.bytes() == Some(content.as_slice()));
        if right {
            self.effective = Some(STAND_ALONE_FILE.to_owned());
        } else {
            self.steps.push(Step::Write {
                name: STAND_ALONE_FILE.to_owned(),
                content,
                mode: FileMode::Exactly(mode),
                expect: None,
            });
        }
        self.other_files_of_ours(net, STAND_ALONE_FILE);
    }
}
