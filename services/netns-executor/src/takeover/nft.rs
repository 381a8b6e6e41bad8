//! Istio's rules in nftables: its own tables, and the chains of iptables-nft (`linux/netfilter/nf_tables.h`).

use super::{Findings, Scope, is_istio_chain};
use crate::netlink::NetfilterSocket;
use crate::netlink::bytes::{Attributes, Message, Writer};
use crate::netlink::error::NetlinkError;
use crate::netlink::socket::{ACK, DUMP, REQUEST};

const SUBSYSTEM: u16 = 10 << 8;
const NEWTABLE: u16 = SUBSYSTEM;
const GETTABLE: u16 = SUBSYSTEM | 0x1;
const DELTABLE: u16 = SUBSYSTEM | 0x2;
const NEWCHAIN: u16 = SUBSYSTEM | 0x3;
const GETCHAIN: u16 = SUBSYSTEM | 0x4;
const DELCHAIN: u16 = SUBSYSTEM | 0x5;
const NEWRULE: u16 = SUBSYSTEM | 0x6;
const GETRULE: u16 = SUBSYSTEM | 0x7;
const DELRULE: u16 = SUBSYSTEM | 0x8;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
/// Length of `struct nfgenmsg`.
const FIXED: usize = 4;
const INET: u8 = 1;
const IPV4: u8 = 2;
const IPV6: u8 = 10;
/// Somebody may change the rules between the look and the deletion.
const ATTEMPTS: usize = 3;

/// What to delete, in an order the kernel accepts.
#[derive(Debug, Default)]
pub(super) struct Plan {
    steps: Vec<Step>,
    pub(super) findings: Findings,
}

#[derive(Debug, Clone)]
struct Step {
    family: u8,
    table: String,
    what: What,
}

#[derive(Debug, Clone)]
enum What {
    Rule { chain: String, handle: u64 },
    AllRules { chain: String },
    Chain(String),
    Table,
}

struct Table {
    family: u8,
    name: String,
    /// Chains, sets, objects and flow tables in it.
    members: u32,
}

struct Chain {
    table: String,
    name: String,
    is_base: bool,
}

struct Rule {
    chain: String,
    handle: u64,
    /// The chain it jumps or goes to.
    target: Option<String>,
    /// It looks into an ipset, as the rules of Istio's host chain do.
    looks_into_ipset: bool,
}

/// Finds what is Istio's.
pub(super) fn plan(socket: &NetfilterSocket, scope: Scope) -> Result<Plan, NetlinkError> {
    let mut plan = Plan::default();
    let tables = read_tables(socket)?;
    for family in [IPV4, IPV6] {
        let compatible = |table: &&Table| table.family == family && is_iptables_table(&table.name, scope);
        let mut compatible = tables.iter().filter(compatible).peekable();
        if compatible.peek().is_none() {
            continue;
        }
        let chains = read_chains(socket, family)?;
        for table in compatible {
            let chains: Vec<_> = chains.iter().filter(|chain| chain.table == table.name).collect();
            if chains.iter().any(|chain| is_istio_chain(&chain.name, scope)) {
                plan.add_chains(table, &chains, &read_rules(socket, family, &table.name)?, scope);
            }
        }
    }
    for table in tables
        .iter()
        .filter(|table| table.family == INET && is_istio_table(&table.name, scope))
    {
        plan.findings.istio.push(format!("table inet {}", table.name));
        plan.push(table, What::Table);
    }
    Ok(plan)
}

/// Finds and deletes it, in one transaction.
pub(super) fn remove(socket: &NetfilterSocket, scope: Scope) -> Result<Findings, NetlinkError> {
    let mut attempt = 1;
    loop {
        let plan = plan(socket, scope)?;
        match plan.execute(socket) {
            Err(error) if attempt < ATTEMPTS && is_race(&error) => attempt += 1,
            outcome => return outcome.map(|()| plan.findings),
        }
    }
}

fn is_race(error: &NetlinkError) -> bool {
    matches!(error.errno(), Some(libc::ENOENT | libc::EBUSY))
}

fn is_istio_table(name: &str, scope: Scope) -> bool {
    match scope {
        Scope::Pod => matches!(
            name,
            "istio-ambient-nat" | "istio-ambient-mangle" | "istio-ambient-raw"
        ),
        Scope::Host => name == "istio-ambient-nat",
    }
}

fn is_iptables_table(name: &str, scope: Scope) -> bool {
    match scope {
        Scope::Pod => matches!(name, "nat" | "mangle" | "raw" | "filter"),
        Scope::Host => name == "nat",
    }
}

impl Plan {
    fn push(&mut self, table: &Table, what: What) {
        self.steps.push(Step {
            family: table.family,
            table: table.name.clone(),
            what,
        });
    }

    fn add_chains(&mut self, table: &Table, chains: &[&Chain], rules: &[Rule], scope: Scope) {
        let label = format!(
            "{} {}",
            if table.family == IPV4 { "ip" } else { "ip6" },
            table.name
        );
        let is_istio = |chain: &str| is_istio_chain(chain, scope);
        // In a pod the chains are Istio's by their name; on the host somebody may have added to one.
        let is_foreign =
            |rule: &Rule| scope == Scope::Host && is_istio(&rule.chain) && !rule.looks_into_ipset;
        let mut gone: Vec<&str> = Vec::new();
        for chain in chains.iter().filter(|chain| is_istio(&chain.name)) {
            let foreign = rules
                .iter()
                .filter(|rule| rule.chain == chain.name && is_foreign(rule))
                .count();
            if foreign == 0 {
                gone.push(&chain.name);
                self.findings
                    .istio
                    .push(format!("chain {} of table {label}", chain.name));
            } else {
                self.findings.foreign.push(format!(
                    "{foreign} rules in chain {} of table {label}",
                    chain.name
                ));
            }
        }
        let mut deleted = Vec::new();
        for rule in rules.iter().filter(|rule| !gone.contains(&rule.chain.as_str())) {
            let jumps_nowhere = rule
                .target
                .as_deref()
                .is_some_and(|target| gone.contains(&target));
            if jumps_nowhere || (is_istio(&rule.chain) && !is_foreign(rule)) {
                let kind = if jumps_nowhere { "jump" } else { "rule" };
                self.findings
                    .istio
                    .push(format!("{kind} in chain {} of table {label}", rule.chain));
                self.push(
                    table,
                    What::Rule {
                        chain: rule.chain.clone(),
                        handle: rule.handle,
                    },
                );
                deleted.push(rule.handle);
            }
        }
        for chain in &gone {
            self.push(
                table,
                What::AllRules {
                    chain: (*chain).to_owned(),
                },
            );
        }
        for chain in &gone {
            self.push(table, What::Chain((*chain).to_owned()));
        }
        if scope == Scope::Pod {
            self.clear_away(table, chains, rules, &gone, &deleted);
        }
    }

    /// Base chains that iptables-nft made for the jumps, and its table, go too if nothing else is in them.
    fn clear_away(
        &mut self,
        table: &Table,
        chains: &[&Chain],
        rules: &[Rule],
        gone: &[&str],
        deleted: &[u64],
    ) {
        let is_emptied = |chain: &&&Chain| {
            let mut own = rules.iter().filter(|rule| rule.chain == chain.name).peekable();
            chain.is_base && own.peek().is_some() && own.all(|rule| deleted.contains(&rule.handle))
        };
        let emptied: Vec<_> = chains.iter().filter(is_emptied).collect();
        for chain in &emptied {
            self.push(table, What::Chain(chain.name.clone()));
        }
        if table.members as usize == gone.len() + emptied.len() {
            self.push(table, What::Table);
        }
    }

    fn execute(&self, socket: &NetfilterSocket) -> Result<(), NetlinkError> {
        if self.steps.is_empty() {
            return Ok(());
        }
        let mut writer = Writer::new();
        writer.message(BATCH_BEGIN, REQUEST, 0, &[0, 0, 0, 10], |_| {});
        let mut sequence = 0;
        for step in &self.steps {
            sequence += 1;
            step.write(&mut writer, sequence);
        }
        writer.message(BATCH_END, REQUEST, sequence + 1, &[0, 0, 0, 10], |_| {});
        match socket
            .transact(&writer.into_bytes(), sequence)?
            .into_iter()
            .next()
        {
            None => Ok(()),
            Some(refusal) => {
                let step = (refusal.sequence as usize)
                    .checked_sub(1)
                    .and_then(|index| self.steps.get(index));
                Err(refusal.into_error(format!("deletion of old rules ({step:?})")))
            }
        }
    }
}

impl Step {
    fn write(&self, writer: &mut Writer, sequence: u32) {
        let fixed = [self.family, 0, 0, 0];
        let mut message = |ty, body: &dyn Fn(&mut Writer)| {
            writer.message(ty, REQUEST | ACK, sequence, &fixed, |w| {
                w.string(1, &self.table);
                body(w);
            });
        };
        match &self.what {
            What::Rule { chain, handle } => message(DELRULE, &|w| {
                w.string(2, chain);
                w.attribute(3, &handle.to_be_bytes());
            }),
            What::AllRules { chain } => message(DELRULE, &|w| w.string(2, chain)),
            What::Chain(chain) => message(DELCHAIN, &|w| w.string(3, chain)),
            What::Table => message(DELTABLE, &|_| {}),
        }
    }
}

fn read_tables(socket: &NetfilterSocket) -> Result<Vec<Table>, NetlinkError> {
    dump(socket, "the tables", GETTABLE, 0, None, |message, attributes| {
        (message.ty == NEWTABLE).then(|| Table {
            family: message.payload.first().copied().unwrap_or(0),
            name: attributes.string(1).unwrap_or_default().to_owned(),
            members: attributes.be32(3).unwrap_or(u32::MAX),
        })
    })
}

fn read_chains(socket: &NetfilterSocket, family: u8) -> Result<Vec<Chain>, NetlinkError> {
    dump(
        socket,
        "the chains",
        GETCHAIN,
        family,
        None,
        |message, attributes| {
            (message.ty == NEWCHAIN).then(|| Chain {
                table: attributes.string(1).unwrap_or_default().to_owned(),
                name: attributes.string(3).unwrap_or_default().to_owned(),
                is_base: attributes.find(4).is_some(),
            })
        },
    )
}

fn read_rules(socket: &NetfilterSocket, family: u8, table: &str) -> Result<Vec<Rule>, NetlinkError> {
    dump(
        socket,
        "the rules",
        GETRULE,
        family,
        Some(table),
        |message, attributes| {
            (message.ty == NEWRULE && attributes.string(1) == Some(table)).then(|| {
                let mut rule = Rule {
                    chain: attributes.string(2).unwrap_or_default().to_owned(),
                    handle: attributes.be64(3).unwrap_or(0),
                    target: None,
                    looks_into_ipset: false,
                };
                for (_, expression) in attributes.nested(4) {
                    let (name, data) = (Attributes(expression).string(1), Attributes(expression).nested(2));
                    if name == Some("immediate") {
                        // NFTA_IMMEDIATE_DATA, NFTA_DATA_VERDICT, NFTA_VERDICT_CHAIN.
                        rule.target = data.nested(2).nested(2).string(2).map(ToOwned::to_owned);
                    }
                    rule.looks_into_ipset |= name == Some("match") && data.string(1) == Some("set");
                }
                rule
            })
        },
    )
}

fn dump<T>(
    socket: &NetfilterSocket,
    what: &'static str,
    ty: u16,
    family: u8,
    table: Option<&str>,
    parse: impl Fn(&Message<'_>, Attributes<'_>) -> Option<T>,
) -> Result<Vec<T>, NetlinkError> {
    let build = |sequence| {
        let mut writer = Writer::new();
        writer.message(ty, REQUEST | DUMP, sequence, &[family, 0, 0, 0], |w| {
            if let Some(table) = table {
                w.string(1, table);
            }
        });
        writer.into_bytes()
    };
    socket.query(what, build, Vec::new, |found, message| {
        found.extend(parse(message, message.attributes(FIXED)));
    })
}
