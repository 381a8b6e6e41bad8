//! The way back.

use super::{FileMode, Plan, Problem, Step};
use crate::edit::{self, Rest};
use crate::entry::{PLUGIN, QUOTED};
use crate::network::{Single, text};
use crate::node::{BinDir, Binary, File, Kubeconfig, NetDir, is_ours};

/// Plans a removal: our entry out of every file that has it, whoever put it there; then the credentials; then the
/// plugin, but only if no file names it any more, because a chain with a missing plugin can neither start nor end a pod.
pub(crate) fn plan_removal(net: &NetDir, bins: &[BinDir], kubeconfig: &Kubeconfig) -> Plan {
    let mut plan = Plan {
        effective: super::effective(net),
        ..Plan::default()
    };
    if let Some(reason) = &net.unreadable {
        plan.problems.push(Problem::NetDir(reason.clone()));
    }
    for (name, file) in &net.files {
        plan.clean(name.clone(), file);
    }
    for (network, files) in &net.drop_ins {
        for (name, file) in files {
            plan.clean(format!("{network}/{name}"), file);
        }
    }
    if *kubeconfig != Kubeconfig::Missing {
        plan.steps.push(Step::DeleteKubeconfig);
    }
    if plan.problems.is_empty() {
        for (index, bin) in bins.iter().enumerate() {
            match &bin.ours {
                Ok(Binary::Missing) => {}
                Ok(Binary::Current | Binary::Differs) => plan.steps.push(Step::RetireBinary(index)),
                Err(reason) => plan.problems.push(Problem::Binary {
                    dir: bin.host.clone(),
                    reason: reason.clone(),
                }),
            }
        }
    }
    plan
}

impl Plan {
    fn clean(&mut self, name: String, file: &File) {
        let expect = file.bytes().map(<[u8]>::to_vec);
        if is_ours(&name) {
            self.steps.push(Step::Delete { name, expect });
            return;
        }
        if !file.mentions(QUOTED) {
            return;
        }
        let cleaned = file
            .content
            .as_deref()
            .map_err(Clone::clone)
            .and_then(without_entry);
        match cleaned {
            Ok(Rest::Untouched) => {}
            Ok(Rest::Nothing) => self.steps.push(Step::Delete { name, expect }),
            Ok(Rest::Text(text)) => self.steps.push(Step::Write {
                name,
                content: text.into_bytes(),
                mode: FileMode::KeptButGroup,
                expect,
            }),
            Err(reason) => self.problems.push(Problem::Uncleanable { name, reason }),
        }
    }
}

/// By content: a list may have been given any name.
fn without_entry(bytes: &[u8]) -> Result<Rest, String> {
    let explain = |error| sluice_runtime::telemetry::chain(&error);
    let text = text(bytes).map_err(explain)?;
    match Single::parse(text) {
        Ok(single) if single.kind == PLUGIN => Ok(Rest::Nothing),
        Ok(_) => Ok(Rest::Untouched),
        Err(_) => edit::remove(text, &[PLUGIN]).map_err(explain),
    }
}
