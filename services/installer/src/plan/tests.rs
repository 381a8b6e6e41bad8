//! What is planned for directories as they may be found.

mod conditions;
mod edited;
mod owned;
mod precedence;
mod primary;
mod removal;
mod stand_alone;

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Parser;

use super::*;
use crate::config::{Cli, Mode};
use crate::entry::tests::plain;
use crate::node::File;

const OURS: &str = r#"{"type":"sluice-cni","runDir":"/run/sluice","logLevel":"warn"}"#;
const PTP: &str = r#"{"cniVersion":"1.0.0","name":"podnet","plugins":[{"type":"ptp"}]}"#;
const WITH_ISTIO: &str =
    r#"{"cniVersion":"1.0.0","name":"podnet","plugins":[{"type":"ptp"},{"type":"istio-cni"}]}"#;

fn ptp_and_ours() -> String {
    format!(r#"{{"cniVersion":"1.0.0","name":"podnet","plugins":[{{"type":"ptp"}},{OURS}]}}"#)
}

/// A node where everything that a test does not say is as it should be.
struct Given {
    flags: Flags,
    net: NetDir,
    bins: Vec<BinDir>,
    runtimes: Vec<Result<RuntimeDirs, String>>,
    not_serving: Option<&'static str>,
    primary_gone: Duration,
}

fn given(args: &[&str], files: &[(&str, &str)]) -> Given {
    let arguments = [["installer", "--require-kubeconfig", "false"].as_slice(), args].concat();
    let names = ["ptp", "portmap", "macvlan", "other", "multus"];
    Given {
        flags: Cli::try_parse_from(arguments).unwrap().flags,
        net: net(files),
        bins: vec![BinDir {
            host: PathBuf::from("/opt/cni/bin"),
            ours: Ok(Binary::Current),
            names: names.map(str::to_owned).into_iter().collect(),
        }],
        runtimes: Vec::new(),
        not_serving: None,
        primary_gone: Duration::ZERO,
    }
}

fn net(files: &[(&str, &str)]) -> NetDir {
    let mut net = NetDir::default();
    for (name, text) in files {
        let file = File {
            content: Ok(text.as_bytes().to_vec()),
            mode: if name.ends_with("-sluice.conflist") {
                0o600
            } else {
                0o644
            },
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            link: false,
        };
        match name.split_once('/') {
            Some((network, name)) => {
                let files: &mut BTreeMap<_, _> = net.drop_ins.entry(network.to_owned()).or_default();
                files.insert(name.to_owned(), file);
            }
            None => {
                net.files.insert((*name).to_owned(), file);
            }
        }
    }
    net
}

impl Given {
    fn plan(&self) -> Plan {
        plan_install(&Situation {
            flags: &self.flags,
            entry: &Entry {
                stand_alone: self.flags.mode == Mode::StandAlone,
                ..plain()
            },
            net: &self.net,
            bins: &self.bins,
            runtimes: &self.runtimes,
            kubeconfig: &Kubeconfig::Missing,
            credentials: None,
            not_serving: self.not_serving,
            primary_gone: self.primary_gone,
        })
    }

    /// Plans and does it, as far as files are concerned, until nothing is left to do; gives the last plan.
    fn settle(&mut self) -> Plan {
        for _ in 0..4 {
            let plan = self.plan();
            if plan.steps.is_empty() {
                return plan;
            }
            for step in plan.steps {
                self.perform(step);
            }
        }
        panic!("it never ends: {:?}", self.plan());
    }

    fn perform(&mut self, step: Step) {
        match step {
            Step::Write {
                name, content, mode, ..
            } => {
                let text = String::from_utf8(content).unwrap();
                let mut made = net(&[(name.as_str(), text.as_str())]);
                if let Some(file) = made.files.get_mut(&name) {
                    match mode {
                        FileMode::Exactly(mode) => file.mode = mode,
                        FileMode::Like { mode, gid } => (file.mode, file.gid) = (mode, gid),
                        FileMode::Kept | FileMode::KeptButGroup => {
                            let before = &self.net.files[&name];
                            (file.mode, file.gid) = (before.mode, before.gid);
                        }
                    }
                }
                self.net.files.append(&mut made.files);
                for (network, mut files) in made.drop_ins {
                    self.net.drop_ins.entry(network).or_default().append(&mut files);
                }
            }
            Step::Delete { name, .. } => match name.split_once('/') {
                Some((network, name)) => {
                    drop(self.net.drop_ins.get_mut(network).unwrap().remove(name).unwrap());
                }
                None => drop(self.net.files.remove(&name).unwrap()),
            },
            other => panic!("{other:?}"),
        }
    }

    fn text(&self, name: &str) -> &str {
        std::str::from_utf8(self.net.files[name].bytes().unwrap()).unwrap()
    }

    fn names(&self) -> Vec<&str> {
        self.net.files.keys().map(String::as_str).collect()
    }
}

fn problems(plan: &Plan) -> String {
    let texts: Vec<String> = plan.problems.iter().map(ToString::to_string).collect();
    texts.join("; ")
}
