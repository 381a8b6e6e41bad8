//! A netns as the kernel's own tools show it, for comparing before with after.

use sluice_testkit::netns::{Netns, Place};
use sluice_testkit::process::text;

/// nftables ruleset, policy rules and routes of both families, as text. Left out: counters, and link-local routes, which
/// the kernel adds some time after an interface came up.
pub fn rules_of(netns: &Netns) -> anyhow::Result<String> {
    let place = Place::from(netns);
    let mut all = text(&place, "nft", &["-s", "list", "ruleset"], b"")?;
    for family in ["-4", "-6"] {
        all += &text(&place, "ip", &[family, "rule", "show"], b"")?;
        let routes = text(&place, "ip", &[family, "route", "show", "table", "all"], b"")?;
        routes
            .lines()
            .filter(|route| !of_the_link(route))
            .for_each(|route| all.extend([route, "\n"]));
    }
    Ok(all)
}

/// Whether the nftables ruleset holds any redirection to the proxy.
pub fn redirects(netns: &Netns) -> anyhow::Result<bool> {
    Ok(text(&Place::from(netns), "nft", &["-s", "list", "ruleset"], b"")?.contains("redirect"))
}

/// Whether only packets that open a connection are redirected, since others are not known yet to conntrack.
pub fn joins(netns: &Netns) -> anyhow::Result<bool> {
    let rules = text(&Place::from(netns), "nft", &["-s", "list", "ruleset"], b"")?;
    Ok(rules.contains("redirect") && rules.contains("tcp flags"))
}

/// Whether a route, or a change of one, is link-local or multicast: the kernel's own doing.
pub(crate) fn of_the_link(route: &str) -> bool {
    route.contains("fe80:") || route.contains("ff00::/8")
}
