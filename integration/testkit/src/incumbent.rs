//! The rules that Istio's own node agent leaves in a pod, fed to `nft` and `ip` by hand: what the stand-in is proven
//! against, and what a takeover meets.

use crate::netns::{Netns, Place};
use crate::process;

/// nft rules of Istio's agent (native nftables, DNS capture and IPv6 on, default probe addresses).
pub const NFT_RULES: &str = r"
add table inet istio-ambient-nat
add chain inet istio-ambient-nat prerouting { type nat hook prerouting priority -100 ; }
add chain inet istio-ambient-nat output { type nat hook output priority -100 ; }
add chain inet istio-ambient-nat istio-prerouting
add chain inet istio-ambient-nat istio-output
add rule inet istio-ambient-nat output jump istio-output
add rule inet istio-ambient-nat prerouting jump istio-prerouting
add rule inet istio-ambient-nat istio-prerouting meta l4proto tcp ip saddr 169.254.7.127 counter accept
add rule inet istio-ambient-nat istio-prerouting meta l4proto tcp ip6 saddr fd16:9254:7127:1337:ffff:ffff:ffff:ffff counter accept
add rule inet istio-ambient-nat istio-output meta l4proto tcp ip daddr 169.254.7.127 counter accept
add rule inet istio-ambient-nat istio-output meta l4proto tcp ip6 daddr fd16:9254:7127:1337:ffff:ffff:ffff:ffff counter accept
add rule inet istio-ambient-nat istio-prerouting ip daddr != 127.0.0.1/32 tcp dport != 15008 mark and 0xfff != 0x539 counter redirect to :15006
add rule inet istio-ambient-nat istio-prerouting ip6 daddr != ::1/128 tcp dport != 15008 mark and 0xfff != 0x539 counter redirect to :15006
add rule inet istio-ambient-nat istio-output oifname != lo mark and 0xfff != 0x539 udp dport 53 counter redirect to :15053
add rule inet istio-ambient-nat istio-output ip daddr != 127.0.0.1/32 tcp dport 53 mark and 0xfff != 0x539 counter redirect to :15053
add rule inet istio-ambient-nat istio-output ip6 daddr != ::1/128 tcp dport 53 mark and 0xfff != 0x539 counter redirect to :15053
add rule inet istio-ambient-nat istio-output meta l4proto tcp mark and 0xfff == 0x111 counter accept
add rule inet istio-ambient-nat istio-output oifname lo ip daddr != 127.0.0.1/32 counter accept
add rule inet istio-ambient-nat istio-output oifname lo ip6 daddr != ::1/128 counter accept
add rule inet istio-ambient-nat istio-output meta l4proto tcp ip daddr != 127.0.0.1/32 mark and 0xfff != 0x539 counter redirect to :15001
add rule inet istio-ambient-nat istio-output meta l4proto tcp ip6 daddr != ::1/128 mark and 0xfff != 0x539 counter redirect to :15001
add table inet istio-ambient-mangle
add chain inet istio-ambient-mangle prerouting { type filter hook prerouting priority -150 ; }
add chain inet istio-ambient-mangle output { type route hook output priority -150 ; }
add chain inet istio-ambient-mangle istio-prerouting
add chain inet istio-ambient-mangle istio-output
add rule inet istio-ambient-mangle prerouting jump istio-prerouting
add rule inet istio-ambient-mangle output jump istio-output
add rule inet istio-ambient-mangle istio-prerouting meta mark & 0xfff == 0x539 counter ct mark set ct mark & 0xfffff000 | 0x111
add rule inet istio-ambient-mangle istio-output ct mark and 0xfff == 0x111 counter meta mark set ct mark
add table inet istio-ambient-raw
add chain inet istio-ambient-raw prerouting { type filter hook prerouting priority -300 ; }
add chain inet istio-ambient-raw output { type filter hook output priority -300 ; }
add chain inet istio-ambient-raw istio-prerouting
add chain inet istio-ambient-raw istio-output
add rule inet istio-ambient-raw prerouting jump istio-prerouting
add rule inet istio-ambient-raw output jump istio-output
add rule inet istio-ambient-raw istio-output udp dport 53 meta mark and 0xfff == 0x539 counter ct zone set 1
add rule inet istio-ambient-raw istio-prerouting udp sport 53 meta mark and 0xfff != 0x539 counter ct zone set 1
";

/// Programs [`NFT_RULES`] and the policy routing into a netns.
pub fn program_nft(netns: &Netns) -> anyhow::Result<()> {
    process::text(&Place::from(netns), "nft", &["-f", "-"], NFT_RULES.as_bytes())?;
    program_routing(netns)
}

/// The policy routing of Istio's agent: mark 0x111 to table 100, which is all local.
pub fn program_routing(netns: &Netns) -> anyhow::Result<()> {
    let place = Place::from(netns);
    let lo_has_ipv6 = netns.run(|| {
        std::fs::read_to_string("/proc/sys/net/ipv6/conf/lo/disable_ipv6")
            .is_ok_and(|value| value.trim() == "0")
    });
    let families = [("-4", "0.0.0.0/0", true), ("-6", "::/0", lo_has_ipv6)];
    for (family, any, _) in families.iter().filter(|(_, _, wanted)| *wanted) {
        let rule = [
            family,
            "rule",
            "add",
            "fwmark",
            "0x111/0xfff",
            "pref",
            "32764",
            "lookup",
            "100",
        ];
        process::text(&place, "ip", &rule, b"")?;
        process::text(
            &place,
            "ip",
            &[family, "route", "add", "local", any, "dev", "lo", "table", "100"],
            b"",
        )?;
    }
    Ok(())
}

/// Which iptables a pod's rules were made with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Iptables {
    /// `iptables-nft`.
    Nft,
    /// `iptables-legacy`.
    Legacy,
}

/// Programs the rules of Istio's iptables backend (DNS capture on), IPv4 and if `ipv6` also IPv6, and the policy routing.
pub fn program_iptables(netns: &Netns, variant: Iptables, ipv6: bool) -> anyhow::Result<()> {
    let suffix = match variant {
        Iptables::Nft => "nft",
        Iptables::Legacy => "legacy",
    };
    let place = Place::from(netns);
    let v4 = iptables_rules("169.254.7.127", "127.0.0.1/32");
    process::text(
        &place,
        &format!("iptables-{suffix}-restore"),
        &["--noflush"],
        v4.as_bytes(),
    )?;
    if ipv6 {
        let v6 = iptables_rules("fd16:9254:7127:1337:ffff:ffff:ffff:ffff", "::1/128");
        process::text(
            &place,
            &format!("ip6tables-{suffix}-restore"),
            &["--noflush"],
            v6.as_bytes(),
        )?;
    }
    program_routing(netns)
}

/// Input for `iptables-restore --noflush` as Istio's agent writes it with DNS capture on.
pub fn iptables_rules(probe: &str, loopback: &str) -> String {
    format!(
        "* mangle
-N ISTIO_PRERT
-N ISTIO_OUTPUT
-A PREROUTING -j ISTIO_PRERT
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_PRERT -m mark --mark 0x539/0xfff -j CONNMARK --set-xmark 0x111/0xfff
-A ISTIO_OUTPUT -m connmark --mark 0x111/0xfff -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff
COMMIT
* nat
-N ISTIO_PRERT
-N ISTIO_OUTPUT
-A OUTPUT -j ISTIO_OUTPUT
-A PREROUTING -j ISTIO_PRERT
-A ISTIO_PRERT -s {probe} -p tcp -m tcp -j ACCEPT
-A ISTIO_OUTPUT -d {probe} -p tcp -m tcp -j ACCEPT
-A ISTIO_PRERT ! -d {loopback} -p tcp ! --dport 15008 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15006
-A ISTIO_OUTPUT ! -o lo -p udp -m mark ! --mark 0x539/0xfff -m udp --dport 53 -j REDIRECT --to-port 15053
-A ISTIO_OUTPUT ! -d {loopback} -p tcp --dport 53 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15053
-A ISTIO_OUTPUT -p tcp -m mark --mark 0x111/0xfff -j ACCEPT
-A ISTIO_OUTPUT ! -d {loopback} -o lo -j ACCEPT
-A ISTIO_OUTPUT ! -d {loopback} -p tcp -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15001
COMMIT
* raw
-N ISTIO_OUTPUT
-N ISTIO_PRERT
-A PREROUTING -j ISTIO_PRERT
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_OUTPUT -p udp -m mark --mark 0x539/0xfff -m udp --dport 53 -j CT --zone 1
-A ISTIO_PRERT -p udp -m mark ! --mark 0x539/0xfff -m udp --sport 53 -j CT --zone 1
COMMIT
"
    )
}
