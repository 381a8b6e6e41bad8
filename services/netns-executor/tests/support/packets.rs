//! Random packets of a pod and random options.
#![allow(clippy::unwrap_used, reason = "a test ends with the first surprise")]

use sluice_netns_executor::rules::evaluate::Packet;
use sluice_netns_executor::rules::{Hook, MARK_LOCAL_REPLY, MARK_MASK, Protocol};
use sluice_proto::ambient::AmbientOptions;
use sluice_proto::id::InterfaceName;

pub(crate) const INTERFACES: [&str; 2] = ["fake1s0f0", "fake1s0f1"];
pub(crate) const PROBE_V6: &str = "fd16:9254:7127:1337:ffff:ffff:ffff:ffff";

/// SplitMix64: small, and the same everywhere.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[usize::try_from(self.next() % from.len() as u64).unwrap()].clone()
    }
}

pub(crate) fn random_packet(
    random: &mut Random,
    hook: Hook,
    port: u16,
    source: &str,
    destination: &str,
) -> Packet {
    let any_mark = u32::try_from(random.next() & 0xffff_ffff).unwrap();
    let mark = random.pick(&[0, 0, 0, 0, 0x539, 0x539, 0x111, 0x7539, 0x7111, any_mark]);
    let ct_mark = random.pick(&[0, 0, 0, 0x111, 0x5111, 0x539, any_mark]);
    let protocol = random.pick(&[Protocol::Tcp, Protocol::Tcp, Protocol::Udp]);
    let service = random.pick(&[53, 53, 80, 443, 8080, 15008, 15009, 5353]);
    let answer = hook == Hook::Prerouting && random.pick(&[true, false, false]);
    Packet {
        hook,
        protocol,
        source: source.parse().unwrap(),
        destination: destination.parse().unwrap(),
        source_port: if answer { 53 } else { port },
        destination_port: if answer { port } else { service },
        in_interface: None,
        out_loopback: false,
        mark,
        ct_mark,
        new_connection: true,
        opens_tcp: true,
        socket_uid: (hook == Hook::Output).then_some(0),
    }
}

/// A packet of a process in the pod.
pub(crate) fn outbound(random: &mut Random, port: u16, options: &AmbientOptions) -> Packet {
    let (source, destination, local) = random.pick(&[
        ("10.0.0.2", "192.0.2.1", false),
        ("10.0.0.2", "10.0.0.1", false),
        ("10.0.1.2", "10.0.1.1", false),
        ("10.0.0.2", "169.254.7.127", false),
        ("10.0.0.2", "10.0.0.2", true),
        ("10.0.0.2", "10.9.9.9", true),
        ("127.0.0.1", "127.0.0.1", true),
        ("127.0.0.1", "127.0.0.2", true),
        ("fd00::2", "2001:db8::1", false),
        ("fd00::2", "fd00::1", false),
        ("fd01::2", "fd01::1", false),
        ("fd00::2", PROBE_V6, false),
        ("fd00::2", "fd00::2", true),
        ("fd00::2", "fd99::9", true),
        ("::1", "::1", true),
    ]);
    let packet = random_packet(random, Hook::Output, port, source, destination);
    // The route is looked up before any rule: by the mark the socket has.
    let by_mark =
        packet.mark & MARK_MASK == MARK_LOCAL_REPLY && (options.ipv6 || packet.destination.is_ipv4());
    Packet {
        out_loopback: local || by_mark,
        ..packet
    }
}

/// A packet from outside.
pub(crate) fn inbound(random: &mut Random, port: u16) -> Packet {
    let net = random.pick(&[0, 0, 1, 2]);
    let (sources, destination) = if random.pick(&[true, false]) {
        let sources = [
            format!("10.0.{net}.1"),
            "203.0.113.7".to_owned(),
            "169.254.7.127".to_owned(),
        ];
        (
            sources,
            if random.pick(&[true, false]) && net == 0 {
                "10.9.9.9".to_owned()
            } else {
                format!("10.0.{net}.2")
            },
        )
    } else {
        let sources = [
            format!("fd0{net}::1"),
            "2001:db8::7".to_owned(),
            PROBE_V6.to_owned(),
        ];
        (
            sources,
            if random.pick(&[true, false]) && net == 0 {
                "fd99::9".to_owned()
            } else {
                format!("fd0{net}::2")
            },
        )
    };
    let name = ["eth0", INTERFACES[0], INTERFACES[1]][net];
    let source = random.pick(&sources);
    let packet = random_packet(random, Hook::Prerouting, port, &source, &destination);
    Packet {
        in_interface: Some(InterfaceName::parse(name).unwrap()),
        ..packet
    }
}

pub(crate) fn all_options() -> Vec<AmbientOptions> {
    let mut all = Vec::new();
    for index in 0..24_usize {
        let interfaces = INTERFACES[..index % 3]
            .iter()
            .map(|name| InterfaceName::parse(*name).unwrap())
            .collect();
        all.push(AmbientOptions {
            dns_capture: index / 3 % 2 == 0,
            bypass_inbound_capture: index / 6 % 2 == 1,
            virtual_interfaces: interfaces,
            ipv6: index / 12 == 0,
            ..AmbientOptions::default()
        });
    }
    all
}
