//! Which files of the network configuration directory are written and removed.

use rustix::process::{Gid, getegid, getgroups};

use super::primary::{check_primary, is_gone, primary, with_entry};
use super::{FileMode, Plan, Problem, Situation, Step};
use crate::config::{BinDirCheck, Mode, WhenPreempted};
use crate::entry::{Entry, Layout, PLUGIN, QUOTED};
use crate::network::Network;
use crate::node::{Loaded, NetDir, is_ours};

impl Plan {
    pub(super) fn config(&mut self, situation: &Situation<'_>) {
        let (flags, net) = (situation.flags, situation.net);
        if let Some(reason) = &net.unreadable {
            self.problems.push(Problem::NetDir(reason.clone()));
            return;
        }
        let installed = net.valid(true).any(|(_, loaded)| loaded.has(PLUGIN));
        if let Some(why) = situation.not_serving {
            self.problems.push(Problem::NotServing(why.to_owned()));
            // What is installed stays and is kept right; nothing is installed anew.
            if !installed {
                if flags.mode != Mode::StandAlone {
                    self.primary = primary(flags, net).ok().map(|(name, _)| name);
                }
                return;
            }
        }
        if flags.mode == Mode::StandAlone {
            self.stand_alone(situation);
            return;
        }
        let (name, loaded) = match primary(flags, net) {
            Ok(found) => found,
            Err(problem) => {
                self.problems.push(problem);
                self.without_primary(situation);
                return;
            }
        };
        self.primary = Some(name.clone());
        self.notes.extend(
            situation
                .runtimes
                .iter()
                .filter_map(|runtime| runtime.as_ref().err().cloned()),
        );
        if let Err(problem) = check_primary(situation, &name, &loaded) {
            let directories = matches!(
                problem,
                Problem::BinDir { .. } | Problem::RuntimeSearches { .. } | Problem::RuntimeReads { .. }
            );
            if directories && flags.bin_dir_check == BinDirCheck::Warn {
                self.notes.push(problem.to_string());
            } else {
                self.problems.push(problem);
                return;
            }
        }
        if situation.bins.iter().any(|bin| bin.ours.is_err()) {
            // Told already; the plugin may be missing there.
            return;
        }
        let planned = if flags.mode == Mode::Owned {
            self.owned(situation, &name, &loaded)
        } else {
            self.chained(situation, &name, &loaded)
        };
        match planned {
            Ok(target) => self.other_files(situation, &target),
            Err(problem) => self.problems.push(problem),
        }
    }

    /// A chain whose first plugin is gone starts no pod and makes the node look ready: after a grace, in which a
    /// primary may replace its file in two steps, our copy of it goes, too.
    fn without_primary(&mut self, situation: &Situation<'_>) {
        self.primary_gone = is_gone(situation.flags, situation.net);
        if !self.primary_gone || situation.primary_gone < situation.flags.primary_grace() {
            return;
        }
        for (name, file) in situation.net.files.iter().filter(|(name, _)| is_ours(name)) {
            self.steps.push(Step::Delete {
                name: name.clone(),
                expect: file.bytes().map(<[u8]>::to_vec),
            });
        }
    }

    /// Our own file: the primary's content with our entry. Gives its name.
    fn owned(
        &mut self,
        situation: &Situation<'_>,
        primary: &str,
        loaded: &Loaded<'_>,
    ) -> Result<String, Problem> {
        let target = situation.flags.owned_name().to_owned();
        let content = with_entry(situation, primary, loaded, true)?;
        let mode = situation.flags.owned_mode();
        let found = situation.net.files.get(&target);
        let right = found
            .is_some_and(|file| !file.link && file.mode == mode && file.bytes() == Some(content.as_slice()));
        if !right {
            self.steps.push(Step::Write {
                name: target.clone(),
                content,
                mode: FileMode::Exactly(mode),
                expect: None,
            });
        }
        Ok(target)
    }

    /// The primary's own file. Gives the name of the file that has our entry in the end.
    fn chained(
        &mut self,
        situation: &Situation<'_>,
        name: &str,
        loaded: &Loaded<'_>,
    ) -> Result<String, Problem> {
        if let Network::List(list) = &loaded.network
            && list.plugins.is_none()
        {
            // Inline plugins run before those of files, so ours must be a file, too, and the last of them.
            let drop_in = format!("{}/zz-{PLUGIN}.conf", list.name);
            self.drop_in(situation, &list.name, drop_in)?;
            return Ok(name.to_owned());
        }
        let Some(file) = situation.net.files.get(name) else {
            return Ok(name.to_owned());
        };
        let before = file.bytes().unwrap_or_default();
        let after = with_entry(situation, name, loaded, false)?;
        let target = match (&loaded.network, name.strip_suffix(".conf")) {
            (Network::Single(_), Some(stem)) => format!("{stem}.conflist"),
            _ => name.to_owned(),
        };
        if before == after.as_slice() && target == name {
            return Ok(target);
        }
        if file.link {
            return Err(Problem::Link(name.to_owned()));
        }
        if file.uid != rustix::process::geteuid().as_raw() {
            return Err(Problem::Owner {
                name: name.to_owned(),
                uid: file.uid,
            });
        }
        if situation.net.group != Some(file.gid) && !is_our_group(file.gid) {
            return Err(Problem::Group {
                name: name.to_owned(),
                gid: file.gid,
            });
        }
        let converted = target != name;
        self.steps.push(Step::Write {
            name: target.clone(),
            content: after,
            mode: if converted {
                FileMode::Like {
                    mode: file.mode,
                    gid: file.gid,
                }
            } else {
                FileMode::Kept
            },
            expect: (!converted).then(|| before.to_vec()),
        });
        if converted {
            // After the list is there: at no instant is there a `.conf` with a list in it, or none of the two.
            self.steps.push(Step::Delete {
                name: name.to_owned(),
                expect: Some(before.to_vec()),
            });
        }
        Ok(target)
    }

    fn drop_in(&mut self, situation: &Situation<'_>, network: &str, name: String) -> Result<(), Problem> {
        let mut content = render(situation.entry, &name)?.into_bytes();
        content.push(b'\n');
        let file_name = format!("zz-{PLUGIN}.conf");
        let found = situation
            .net
            .drop_ins
            .get(network)
            .and_then(|files| files.get(&file_name));
        if found.and_then(|file| file.bytes()) != Some(content.as_slice()) {
            self.steps.push(Step::Write {
                name,
                content,
                mode: FileMode::Exactly(situation.flags.owned_mode()),
                expect: None,
            });
        }
        Ok(())
    }

    /// Files of ours from other settings go.
    pub(super) fn other_files_of_ours(&mut self, net: &NetDir, target: &str) {
        for (name, file) in net
            .files
            .iter()
            .filter(|(name, _)| is_ours(name) && *name != target)
        {
            self.steps.push(Step::Delete {
                name: name.clone(),
                expect: file.bytes().map(<[u8]>::to_vec),
            });
        }
    }

    /// Besides, a file that the runtime prefers is told, or takes our entry as well.
    fn other_files(&mut self, situation: &Situation<'_>, target: &str) {
        let net = situation.net;
        self.other_files_of_ours(net, target);
        let replaced = |name: &str| {
            self.steps
                .iter()
                .any(|step| matches!(step, Step::Delete { name: gone, .. } if gone == name))
        };
        let first = net
            .valid(true)
            .find(|(name, _)| !is_ours(name) && !replaced(name))
            .filter(|(name, _)| name.as_str() < target);
        if let Some((name, loaded)) = first {
            self.preempted(situation, name, &loaded, target);
        }
        for (name, reason) in net.skipped() {
            if name.as_str() < target {
                self.notes.push(format!(
                    "{name} sorts before our entry and is not valid ({reason}): containerd loads no network at all \
                     because of it"
                ));
            }
        }
    }

    /// A runtime prefers `name` to `target`, where our entry is.
    fn preempted(&mut self, situation: &Situation<'_>, name: &str, loaded: &Loaded<'_>, target: &str) {
        let file = situation.net.files.get(name);
        let delegates = |to: &str| file.is_some_and(|file| file.mentions(to));
        if delegates(QUOTED) || delegates(target) {
            // As Multus does, which carries the chain of the file that it found first, or names that file.
            self.notes
                .push(format!("{name} sorts before {target} and hands over to it"));
            return;
        }
        let chained = match situation.flags.when_preempted {
            WhenPreempted::Report => Err(Problem::NotFirst(name.to_owned())),
            WhenPreempted::Chain => check_primary(situation, name, loaded)
                .and_then(|()| self.chained(situation, name, loaded))
                .map(drop),
        };
        self.problems.extend(chained.err());
    }
}

/// Whether the kernel lets us give a file of ours to the group. CAP_CHOWN, which would allow any, is dropped at start.
fn is_our_group(gid: u32) -> bool {
    let is_it = |group: Gid| group.as_raw() == gid;
    is_it(getegid()) || getgroups().is_ok_and(|groups| groups.into_iter().any(is_it))
}

fn render(entry: &Entry, name: &str) -> Result<String, Problem> {
    entry.render(&Layout::Compact).map_err(|error| Problem::Derive {
        name: name.to_owned(),
        reason: error.to_string(),
    })
}
