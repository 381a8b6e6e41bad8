//! Traffic outside of the mesh, through the proxy, DNS, and the kubelet's probes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use sluice_proto::ambient::{PROBE_IPV4, PROBE_IPV6};
use sluice_testkit::node::{BRIDGE_V4, BRIDGE_V6};
use sluice_testkit::standin::{DNS_MARKER_V4, DNS_MARKER_V6};
use sluice_testkit::traffic::client::fetch;
use sluice_testkit::traffic::dns::{self, DnsServer};

use super::narrator::{Narrator, Step};
use super::stage::{ANSWER, Stage};

/// Requests between pods.
pub(super) fn requests(narrator: &mut Narrator, stage: &Stage) {
    narrator.step(
        "Traffic outside of the mesh and through the proxy",
        "The application answers with the addresses it sees. The stand-in proxy counts the connections that reached it: \
         on port 15001 (leaving a pod) and 15006 (arriving).",
        |step| {
            for ipv6 in [false, true] {
                let family = if ipv6 { "IPv6" } else { "IPv4" };
                let before = stage.mesh.control().counts()?;
                let seen = fetch(stage.outsider.netns(), Stage::app(&stage.plain, ipv6), ANSWER)?;
                let relayed = total(&stage.mesh.control().counts()?) - total(&before);
                step.saw(
                    relayed == 0 && seen.peer.ip() == stage.outsider.address(ipv6),
                    format!("{family}, plain pod to plain pod: seen as {}, connections relayed {relayed}", seen.peer.ip()),
                );
                through_proxy(step, stage, ipv6)?;
            }
            let before = stage.relayed(&stage.server)?;
            let seen = fetch(stage.outsider.netns(), Stage::app(&stage.server, false), ANSWER)?;
            let inbound = stage.relayed(&stage.server)?.inbound - before.inbound;
            step.saw(
                inbound == 1 && seen.peer.ip() == stage.outsider.address(false),
                format!("plain pod to mesh pod: {inbound} connection relayed on arrival, seen as {}", seen.peer.ip()),
            );
            Ok(())
        },
    );
}

fn total(report: &sluice_testkit::standin::Report) -> u64 {
    report
        .workloads
        .values()
        .map(|workload| workload.counts.outbound + workload.counts.inbound)
        .sum()
}

fn through_proxy(step: &mut Step, stage: &Stage, ipv6: bool) -> anyhow::Result<()> {
    let before = (stage.relayed(&stage.client)?, stage.relayed(&stage.server)?);
    let target = Stage::app(&stage.server, ipv6);
    let seen = fetch(stage.client.netns(), target, ANSWER)?;
    let after = (stage.relayed(&stage.client)?, stage.relayed(&stage.server)?);
    let (outbound, inbound) = (
        after.0.outbound - before.0.outbound,
        after.1.inbound - before.1.inbound,
    );
    step.saw(
        outbound == 1 && inbound == 1 && seen.peer.ip() == stage.client.address(ipv6) && seen.local == target,
        format!(
            "{}, mesh pod to mesh pod: relayed when leaving {outbound}, when arriving {inbound}; the application saw the \
             client as {} and was reached at {}, the address that was called",
            if ipv6 { "IPv6" } else { "IPv4" },
            seen.peer.ip(),
            seen.local,
        ),
    );
    step.sums_up(format!(
        "{}: source {} kept",
        if ipv6 { "IPv6" } else { "IPv4" },
        seen.peer.ip()
    ));
    Ok(())
}

/// DNS queries of a mesh pod and of a plain one.
pub(super) fn names(narrator: &mut Narrator, stage: &Stage) {
    narrator.step(
        "DNS is captured",
        "A name server in pod plain answers 198.51.100.7. The stand-in proxy answers 192.0.2.53, so the answer shows who \
         was asked.",
        |step| {
            let real = Ipv4Addr::new(198, 51, 100, 7);
            let real_v6 = Ipv6Addr::new(0x2001, 0xdb8, 0xff, 0, 0, 0, 0, 7);
            let address = SocketAddr::new(stage.plain.address(false), 53);
            let server = DnsServer::start(stage.plain.netns(), address, real, real_v6)?;
            for (pod, tcp, ipv6) in [
                (&stage.outsider, false, false),
                (&stage.client, false, false),
                (&stage.client, false, true),
                (&stage.client, true, false),
            ] {
                let before = server.queries();
                let answer = dns::query(pod.netns(), address, "shop.example", ipv6, tcp, ANSWER)?;
                let reached = server.queries() - before;
                let in_mesh = pod.uid() == stage.client.uid();
                let wanted: IpAddr = match (in_mesh, ipv6) {
                    (true, false) => DNS_MARKER_V4.into(),
                    (true, true) => DNS_MARKER_V6.into(),
                    (false, _) => real.into(),
                };
                step.saw(
                    answer == [wanted] && reached == u64::from(!in_mesh),
                    format!(
                        "pod {}, {} query for {}: answer {answer:?}, queries that reached the name server {reached}",
                        pod.name(),
                        if tcp { "TCP" } else { "UDP" },
                        if ipv6 { "AAAA" } else { "A" },
                    ),
                );
                if in_mesh && !ipv6 {
                    step.sums_up(format!("{} answered by the proxy", if tcp { "TCP" } else { "UDP" }));
                }
            }
            Ok(())
        },
    );
}

/// Connections from the host, as the kubelet's probes are.
pub(super) fn probes(narrator: &mut Narrator, stage: &Stage) {
    narrator.step(
        "Probes from the host get through",
        "A request from the host's network namespace, as the kubelet's probes are. It must not reach the proxy, which \
         would refuse it for lack of an identity; its source is rewritten so that the pod's rules know it.",
        |step| {
            for ipv6 in [false, true] {
                probe(step, stage, ipv6)?;
            }
            Ok(())
        },
    );
}

/// One probe of the mesh pod and one of the plain pod.
pub(super) fn probe(step: &mut Step, stage: &Stage, ipv6: bool) -> anyhow::Result<()> {
    let (marked, bridge): (IpAddr, IpAddr) = if ipv6 {
        (PROBE_IPV6.into(), BRIDGE_V6.0.into())
    } else {
        (PROBE_IPV4.into(), BRIDGE_V4.0.into())
    };
    let host = stage.mesh.node().netns();
    let before = stage.relayed(&stage.server)?.inbound;
    let seen = fetch(host, Stage::app(&stage.server, ipv6), ANSWER)?.peer.ip();
    let relayed = stage.relayed(&stage.server)?.inbound - before;
    let seen_plain = fetch(host, Stage::app(&stage.plain, ipv6), ANSWER)?.peer.ip();
    step.saw(
        seen == marked && relayed == 0,
        format!("host to mesh pod: answered, seen as {seen}, connections relayed {relayed}"),
    );
    step.saw(
        seen_plain == bridge,
        format!("host to plain pod: answered, seen as {seen_plain}"),
    );
    step.sums_up(format!("seen as {seen}, relayed {relayed}"));
    Ok(())
}
