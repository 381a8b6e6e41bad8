//! Proof that nobody changed a netns: `nft monitor` and `ip monitor` run inside from before until after.

use std::path::Path;
use std::time::Duration;

use sluice_testkit::netns::{Netns, Place};
use sluice_testkit::process::{Process, Spawn, text};
use sluice_testkit::wait::poll_true;

use crate::netns_state::of_the_link;

const SOON: Duration = Duration::from_secs(10);
/// Netlink protocols as `/proc/net/netlink` shows them (include/uapi/linux/netlink.h).
const ROUTE: u32 = 0;
const NETFILTER: u32 = 12;
/// The table that ends a listening period.
const MARKER: &str = "end_of_watch";

/// What happens to rules, policy routing and routes of one netns.
#[derive(Debug)]
pub struct RuleMonitor {
    netns: Netns,
    rules: Process,
    routing: Process,
}

impl RuleMonitor {
    /// Starts listening; what happens after the return is heard. Logs are written below `dir`.
    pub fn start(netns: &Netns, dir: &Path, name: &str) -> anyhow::Result<Self> {
        let start = |tool: &str, args: &[&str], protocol| -> anyhow::Result<Process> {
            let process = Spawn::program(tool, format!("/usr/sbin/{tool}"))
                .args(args)
                .place(Place::from(netns))
                .log(dir.join(format!("{name}-{tool}-monitor.log")))
                .start()?;
            let pid = process.pid();
            process.wait_ready(SOON, || listens(netns, protocol, pid))?;
            Ok(process)
        };
        Ok(Self {
            netns: netns.clone(),
            rules: start("nft", &["monitor"], NETFILTER)?,
            routing: start("ip", &["monitor", "rule", "route"], ROUTE)?,
        })
    }

    /// Ends listening and gives every line that was heard.
    pub fn stop(self) -> anyhow::Result<Vec<String>> {
        let place = Place::from(&self.netns);
        // Whatever came before the marker has been printed once the marker is.
        text(&place, "nft", &["add", "table", "ip", MARKER], b"")?;
        text(
            &place,
            "ip",
            &["rule", "add", "pref", "31999", "lookup", "main"],
            b"",
        )?;
        poll_true("nft monitor has printed everything", SOON, || {
            self.rules.log_text().contains(MARKER)
        })?;
        poll_true("ip monitor has printed everything", SOON, || {
            self.routing.log_text().contains("31999")
        })?;
        text(&place, "nft", &["delete", "table", "ip", MARKER], b"")?;
        text(&place, "ip", &["rule", "del", "pref", "31999"], b"")?;
        let heard = [self.rules.log_text(), self.routing.log_text()].join("\n");
        let ours = |line: &&str| {
            !line.is_empty() && !line.contains(MARKER) && !line.contains("31999") && !of_the_link(line)
        };
        Ok(heard
            .lines()
            .filter(ours)
            .filter(|line| !line.starts_with("# new generation"))
            .map(String::from)
            .collect())
    }

    /// Fails if anything was heard.
    pub fn silent(self) -> anyhow::Result<()> {
        let heard = self.stop()?;
        anyhow::ensure!(
            heard.is_empty(),
            "{} changes, first: {:?}",
            heard.len(),
            heard.iter().take(5).collect::<Vec<_>>()
        );
        Ok(())
    }
}

/// Whether a process has joined a multicast group of a netlink protocol.
fn listens(netns: &Netns, protocol: u32, pid: u32) -> bool {
    let table = netns
        .run(|| std::fs::read_to_string("/proc/thread-self/net/netlink"))
        .unwrap_or_default();
    table.lines().skip(1).any(|line| {
        let mut words = line.split_whitespace().skip(1);
        let mut number = |radix| {
            words
                .next()
                .and_then(|word| u32::from_str_radix(word, radix).ok())
        };
        let (family, port, groups) = (number(10), number(10), number(16));
        family == Some(protocol) && port == Some(pid) && groups.is_some_and(|groups| groups != 0)
    })
}
