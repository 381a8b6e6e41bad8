//! What a table should be against what the kernel says it is. Pure.

use super::bytes::{Attributes, contains};
use super::nft::{hook_number, kind_name, set_key};
use super::table::{ChainState, EncodedRuleSet, TableDamage, TableState};
use crate::rules::Chain;

const POLICY_ACCEPT: u32 = 1;

/// Differences, and what they mean for the repair.
#[derive(Debug, Default)]
pub(super) struct Comparison {
    /// One line a difference, for people.
    pub(super) lines: Vec<String>,
    /// Only a new table helps: it is dormant, or holds things we never make.
    pub(super) beyond_repair: bool,
    /// Chains or sets are missing, wrong or not ours.
    pub(super) structural: bool,
    /// Names of existing chains and sets that must go first.
    pub(super) removed: Vec<String>,
    /// Chains that are right except for their rules.
    pub(super) stale_chains: Vec<&'static str>,
}

pub(super) fn compare(wanted: &EncodedRuleSet, state: &TableState) -> Comparison {
    let mut result = Comparison::default();
    let rule_set = &wanted.rule_set;
    if state.flags != 0 {
        result.lines.push(format!(
            "table inet {} has flags {:#x}",
            rule_set.table, state.flags
        ));
        result.beyond_repair = true;
    }
    if state.members as usize > state.chains.len() + state.sets.len() {
        result.lines.push(format!(
            "table inet {} holds objects that are not ours",
            rule_set.table
        ));
        result.beyond_repair = true;
    }
    for (chain, expressions) in rule_set.chains.iter().zip(&wanted.expressions) {
        match state.chains.iter().find(|found| found.name == chain.name) {
            None => result.missing(format!("chain {} is missing", chain.name)),
            Some(found) if !is_as_declared(chain, found) => {
                result.wrong(
                    &found.name,
                    format!("chain {} is not `{}`", chain.name, chain.declaration()),
                );
            }
            Some(found) => {
                let lines = rule_differences(chain, expressions, found);
                if !lines.is_empty() {
                    result.stale_chains.push(chain.name);
                    result.lines.extend(lines);
                }
            }
        }
    }
    for found in &state.chains {
        if !rule_set.chains.iter().any(|chain| chain.name == found.name) {
            result.wrong(&found.name, format!("chain {} is not ours", found.name));
        }
    }
    for set in &rule_set.sets {
        match state.sets.iter().find(|found| found.name == set.name) {
            None => result.missing(format!("set {} is missing", set.name)),
            Some(found) if (found.key_type, found.key_length) != set_key(set.family) || found.flags != 0 => {
                result.wrong(
                    &found.name,
                    format!("set {} has another type or other flags", set.name),
                );
            }
            Some(_) => {}
        }
    }
    for found in &state.sets {
        if !rule_set.sets.iter().any(|set| set.name == found.name) {
            result.wrong(&found.name, format!("set {} is not ours", found.name));
        }
    }
    result
}

impl Comparison {
    pub(super) fn damage(&self) -> Option<TableDamage> {
        if self.beyond_repair || self.structural {
            return Some(TableDamage::Changed);
        }
        (!self.lines.is_empty()).then_some(TableDamage::Rules)
    }

    fn missing(&mut self, line: String) {
        self.structural = true;
        self.lines.push(line);
    }

    fn wrong(&mut self, name: &str, line: String) {
        self.removed.push(name.to_owned());
        self.missing(line);
    }
}

fn is_as_declared(chain: &Chain, found: &ChainState) -> bool {
    let base = (
        kind_name(chain.kind).to_owned(),
        hook_number(chain.hook),
        chain.priority,
    );
    found.base.as_ref() == Some(&base) && found.policy == Some(POLICY_ACCEPT)
}

/// Walks both lists; a wanted rule that comes later means that those before it are not ours.
fn rule_differences(chain: &Chain, expressions: &[Vec<u8>], found: &ChainState) -> Vec<String> {
    let equal = |asked: &[u8], rule: &(u64, Vec<u8>)| is_same_rule(&rule.1, asked);
    let mut lines = Vec::new();
    let mut position = 0;
    for (asked, rule) in expressions.iter().zip(&chain.rules) {
        let Some(ahead) = found.rules[position..]
            .iter()
            .position(|other| equal(asked, other))
        else {
            lines.push(format!("chain {} lacks `{rule}`", chain.name));
            continue;
        };
        lines.extend(foreign(chain, &found.rules[position..position + ahead]));
        position += ahead + 1;
    }
    lines.extend(foreign(chain, &found.rules[position..]));
    lines
}

fn foreign(chain: &Chain, rules: &[(u64, Vec<u8>)]) -> impl Iterator<Item = String> {
    rules.iter().map(|(handle, _)| {
        format!(
            "chain {} has a rule that is not ours (handle {handle})",
            chain.name
        )
    })
}

/// Expressions pairwise: same number, and each as asked apart from what the kernel adds.
fn is_same_rule(found: &[u8], asked: &[u8]) -> bool {
    let (mut found, mut asked) = (Attributes(found), Attributes(asked));
    loop {
        match (found.next(), asked.next()) {
            (None, None) => return true,
            (Some((_, found)), Some((_, asked))) if contains(Attributes(found), Attributes(asked)) => {}
            _ => return false,
        }
    }
}
