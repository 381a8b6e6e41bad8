//! Which packets of a mesh pod reach the proxy and which do not, with the real processes, IPv4 and IPv6.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use sluice_integration::manifests::PodOptions;
use sluice_integration::mesh::{Mesh, MeshOptions};
use sluice_integration::scene::{APP_PORT, PATIENCE};
use sluice_proto::pb::workload::PodState;
use sluice_testkit::netns::{Netns, Place};
use sluice_testkit::node::{BRIDGE_V4, BRIDGE_V6};
use sluice_testkit::pod::Pod;
use sluice_testkit::process::text;
use sluice_testkit::standin::{Counts, DNS_MARKER_V4, MARK, TUNNEL_PORT};
use sluice_testkit::traffic::client::{datagram, fetch};
use sluice_testkit::traffic::dns::{DnsServer, query};
use sluice_testkit::traffic::server::EchoServer;
use sluice_testkit::wait::poll_true;
use socket2::{Domain, Socket, Type};

/// Long enough for a SYN that was lost twice.
const ANSWER: Duration = Duration::from_secs(10);
/// What probes come from inside a pod (the same addresses as Istio's agent uses).
const PROBE: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(169, 254, 7, 127)),
    IpAddr::V6(Ipv6Addr::new(
        0xfd16, 0x9254, 0x7127, 0x1337, 0xffff, 0xffff, 0xffff, 0xffff,
    )),
];
/// What the node's own resolver answers.
const RESOLVED: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 7);

/// A mesh pod, a plain pod, and an application in each.
pub(crate) struct Table {
    #[expect(dead_code, reason = "it answers as long as it is there")]
    apps: [EchoServer; 2],
    pub(crate) meshed: Pod,
    pub(crate) plain: Pod,
    mesh: Mesh,
}

impl Table {
    pub(crate) fn start(options: &PodOptions, mesh_options: MeshOptions) -> Self {
        let mesh = Mesh::start_with(mesh_options).unwrap();
        mesh.manifests.namespace("default", "ambient").unwrap();
        let meshed = mesh.node().pod("meshed").dual_stack().create().unwrap();
        let plain = mesh.node().pod("plain").dual_stack().create().unwrap();
        mesh.manifests.pod(&meshed, options).unwrap();
        mesh.manifests.pod(&plain, &PodOptions::mode("none")).unwrap();
        for pod in [&meshed, &plain] {
            mesh.add(pod).unwrap().ok().unwrap();
        }
        mesh.wait_state(&meshed, PodState::Enrolled, PATIENCE).unwrap();
        let apps = [&meshed, &plain].map(|pod| EchoServer::start(pod.netns(), APP_PORT).unwrap());
        Self {
            apps,
            meshed,
            plain,
            mesh,
        }
    }

    fn counts(&self) -> Counts {
        self.mesh.control().counts().unwrap().workloads[self.meshed.uid()].counts
    }

    /// What the proxy counts for the mesh pod while `traffic` runs.
    pub(crate) fn during<T>(&self, traffic: impl FnOnce() -> T) -> (T, Counts) {
        let before = self.counts();
        let result = traffic();
        let now = self.counts();
        let counts = Counts {
            outbound: now.outbound - before.outbound,
            inbound: now.inbound - before.inbound,
            tunnel: now.tunnel - before.tunnel,
            dns_udp: now.dns_udp - before.dns_udp,
            dns_tcp: now.dns_tcp - before.dns_tcp,
            failed: now.failed - before.failed,
            open: 0,
        };
        (result, counts)
    }

    /// Requests `to` from inside `from`: the application must see `seen`, and the proxy must count `expected`.
    fn request(&self, what: &str, from: &Netns, to: SocketAddr, seen: IpAddr, expected: Counts) {
        let (answer, counts) = self.during(|| fetch(from, to, ANSWER));
        let answer = answer.unwrap_or_else(|error| panic!("{what} to {to}: {error}"));
        assert_eq!(answer.peer.ip(), seen, "{what} to {to}: who the application sees");
        assert_eq!(
            answer.local, to,
            "{what} to {to}: where the application was asked"
        );
        assert_eq!(counts, expected, "{what} to {to}");
    }
}

fn outbound() -> Counts {
    Counts {
        outbound: 1,
        ..Counts::default()
    }
}

fn inbound() -> Counts {
    Counts {
        inbound: 1,
        ..Counts::default()
    }
}

fn untouched() -> Counts {
    Counts::default()
}

fn app(ip: IpAddr) -> SocketAddr {
    SocketAddr::new(ip, APP_PORT)
}

fn resolver(ipv6: bool) -> SocketAddr {
    let ip: IpAddr = if ipv6 {
        BRIDGE_V6.0.into()
    } else {
        BRIDGE_V4.0.into()
    };
    SocketAddr::new(ip, 53)
}

/// A socket with the proxy's mark.
fn marked(to: SocketAddr, kind: Type) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(to), kind, None)?;
    socket.set_mark(MARK)?;
    socket.set_read_timeout(Some(ANSWER))?;
    socket.connect_timeout(&to.into(), ANSWER)?;
    Ok(socket)
}

#[test]
fn each_kind_of_tcp_goes_where_it_should() {
    let table = Table::start(&PodOptions::default(), MeshOptions::default());
    let (meshed, plain, host) = (
        table.meshed.netns(),
        table.plain.netns(),
        table.mesh.node().netns(),
    );
    for ipv6 in [false, true] {
        let (own, other) = (table.meshed.address(ipv6), table.plain.address(ipv6));
        let loopback: IpAddr = if ipv6 {
            Ipv6Addr::LOCALHOST.into()
        } else {
            Ipv4Addr::LOCALHOST.into()
        };
        let bridge = resolver(ipv6).ip();
        table.request("outbound", meshed, app(other), own, outbound());
        table.request("inbound", plain, app(own), other, inbound());
        table.request("pod to itself", meshed, app(own), own, untouched());
        table.request("loopback", meshed, app(loopback), loopback, untouched());
        table.request(
            "host probe",
            host,
            app(own),
            PROBE[usize::from(ipv6)],
            untouched(),
        );
        table.request("host to a plain pod", host, app(other), bridge, untouched());
    }
}

#[test]
fn the_proxys_own_connections_are_not_captured() {
    let table = Table::start(&PodOptions::default(), MeshOptions::default());
    for ipv6 in [false, true] {
        let to = app(table.plain.address(ipv6));
        let (answer, counts) = table.during(|| {
            table.meshed.netns().run(|| -> io::Result<String> {
                let mut stream = TcpStream::from(marked(to, Type::STREAM)?);
                stream.write_all(b"GET / HTTP/1.1\r\nhost: app\r\n\r\n")?;
                let mut answer = [0; 12];
                stream.read_exact(&mut answer)?;
                Ok(String::from_utf8_lossy(&answer).into_owned())
            })
        });
        assert_eq!(answer.unwrap(), "HTTP/1.1 200");
        assert_eq!(counts, untouched(), "{to}");
    }
}

#[test]
fn the_tunnel_port_is_not_redirected_again() {
    let options = MeshOptions {
        proxy: vec!["--tunnel".to_owned()],
        ..MeshOptions::default()
    };
    let table = Table::start(&PodOptions::default(), options);
    let second = table.mesh.node().pod("second").dual_stack().create().unwrap();
    table.mesh.manifests.pod(&second, &PodOptions::default()).unwrap();
    table.mesh.add(&second).unwrap().ok().unwrap();
    for ipv6 in [false, true] {
        let tunnel = Counts {
            tunnel: 1,
            ..Counts::default()
        };
        let (from, to) = (second.address(ipv6), app(table.meshed.address(ipv6)));
        table.request("between mesh pods", second.netns(), to, from, tunnel);
        // From outside, too, where no mark tells the packets apart. The proxy counts a connection that says nothing as failed once
        // it has seen its end, and until then that could be taken for the failure of the next one.
        let port = SocketAddr::new(to.ip(), TUNNEL_PORT);
        let failed = table.counts().failed;
        let (ended, counts) = table.during(|| {
            let connected = table
                .plain
                .netns()
                .run(|| TcpStream::connect_timeout(&port, ANSWER).map(drop));
            connected.unwrap();
            poll_true("the proxy to see the end", PATIENCE, || {
                table.counts().failed > failed
            })
        });
        ended.unwrap();
        let refused = Counts { failed: 1, ..tunnel };
        assert_eq!(counts, refused, "{port}");
    }
    let sender = table.mesh.control().counts().unwrap().workloads[second.uid()].counts;
    assert_eq!((sender.outbound, sender.inbound), (2, 0));
}

#[test]
fn dns_is_captured_by_default_and_other_udp_never() {
    let table = Table::start(&PodOptions::default(), MeshOptions::default());
    let meshed = table.meshed.netns();
    for ipv6 in [false, true] {
        for tcp in [false, true] {
            let (answer, counts) =
                table.during(|| query(meshed, resolver(ipv6), "app.test", false, tcp, ANSWER));
            assert_eq!(answer.unwrap(), [IpAddr::from(DNS_MARKER_V4)], "tcp: {tcp}");
            let expected = Counts {
                dns_udp: u64::from(!tcp),
                dns_tcp: u64::from(tcp),
                ..Counts::default()
            };
            assert_eq!(counts, expected, "tcp: {tcp}");
        }
        let to = app(table.plain.address(ipv6));
        let (seen, counts) = table.during(|| datagram(meshed, to, ANSWER));
        assert_eq!(
            (seen.unwrap().ip(), counts),
            (table.meshed.address(ipv6), untouched())
        );
        let to = app(table.meshed.address(ipv6));
        let (seen, counts) = table.during(|| datagram(table.plain.netns(), to, ANSWER));
        assert_eq!(
            (seen.unwrap().ip(), counts),
            (table.plain.address(ipv6), untouched())
        );
    }
}

#[test]
fn the_proxys_own_dns_queries_reach_the_resolver() {
    let table = Table::start(&PodOptions::default(), MeshOptions::default());
    for ipv6 in [false, true] {
        let server = DnsServer::start(
            table.mesh.node().netns(),
            resolver(ipv6),
            RESOLVED,
            Ipv6Addr::LOCALHOST,
        )
        .unwrap();
        let (answered, counts) = table.during(|| {
            table.meshed.netns().run(|| -> io::Result<usize> {
                let socket = UdpSocket::from(marked(resolver(ipv6), Type::DGRAM)?);
                // Id, flags, one question: "a" A IN (RFC 1035 section 4.1).
                socket.send(&[0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, b'a', 0, 0, 1, 0, 1])?;
                socket.recv(&mut [0; 512])
            })
        });
        assert!(answered.unwrap() > 0);
        assert_eq!((server.queries(), counts), (1, untouched()));
    }
}

#[test]
fn an_annotation_switches_dns_capture_off() {
    let options = PodOptions::default().annotation("ambient.istio.io/dns-capture", "false");
    let table = Table::start(&options, MeshOptions::default());
    let meshed = table.meshed.netns();
    for ipv6 in [false, true] {
        let _server = DnsServer::start(
            table.mesh.node().netns(),
            resolver(ipv6),
            RESOLVED,
            Ipv6Addr::LOCALHOST,
        )
        .unwrap();
        let (answer, counts) =
            table.during(|| query(meshed, resolver(ipv6), "app.test", false, false, ANSWER));
        assert_eq!(
            (answer.unwrap(), counts),
            (vec![IpAddr::from(RESOLVED)], untouched())
        );
        // Over TCP it is a connection as any other.
        let (answer, counts) =
            table.during(|| query(meshed, resolver(ipv6), "app.test", false, true, ANSWER));
        assert_eq!(
            (answer.unwrap(), counts),
            (vec![IpAddr::from(RESOLVED)], outbound())
        );
    }
}

#[test]
fn an_annotation_leaves_inbound_traffic_alone() {
    let options = PodOptions::default().annotation("ambient.istio.io/bypass-inbound-capture", "true");
    let table = Table::start(&options, MeshOptions::default());
    for ipv6 in [false, true] {
        let (own, other) = (table.meshed.address(ipv6), table.plain.address(ipv6));
        table.request("inbound", table.plain.netns(), app(own), other, untouched());
        table.request("outbound", table.meshed.netns(), app(other), own, outbound());
    }
}

/// A machine behind the pod, on an interface `name` of the pod, as a VM is (KubeVirt).
fn guest(pod: &Pod, plain: &Pod, name: &str) -> Netns {
    let guest = Netns::new().unwrap();
    let at = |netns: &Netns, program: &str, script: &str| {
        for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let words: Vec<&str> = line.split_whitespace().collect();
            text(&Place::from(netns), program, &words, b"").unwrap();
        }
    };
    pod.netns().run(|| {
        for key in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
            std::fs::write(format!("/proc/sys/net/{key}"), "1").unwrap();
        }
        std::fs::write("/proc/sys/net/ipv6/conf/default/accept_dad", "0").unwrap();
    });
    guest.run(|| std::fs::write("/proc/sys/net/ipv6/conf/default/accept_dad", "0").unwrap());
    at(
        pod.netns(),
        "ip",
        &format!("link add {name} type veth peer name far"),
    );
    // The far end moves by descriptor, which this test's own process has open.
    let descriptor = std::os::fd::AsRawFd::as_raw_fd(&std::os::fd::AsFd::as_fd(&guest));
    let path = format!("/proc/{}/fd/{descriptor}", std::process::id());
    at(pod.netns(), "ip", &format!("link set far netns {path}"));
    at(
        pod.netns(),
        "ip",
        &format!(
            "addr add 10.9.0.1/24 dev {name}\n addr add fd09::1/64 dev {name} nodad\n link set {name} up"
        ),
    );
    let (v4, v6) = (pod.address(false), pod.address(true));
    at(
        &guest,
        "ip",
        "link set lo up\n addr add 10.9.0.2/24 dev far\n addr add fd09::2/64 dev far nodad\n link set far up
         route add default via 10.9.0.1\n -6 route add default via fd09::1",
    );
    at(
        plain.netns(),
        "ip",
        &format!("route add 10.9.0.0/24 via {v4}\n -6 route add fd09::/64 via {v6}"),
    );
    guest
}

#[test]
fn tcp_from_a_virtual_interface_counts_as_outbound() {
    let options = PodOptions::default().annotation("istio.io/reroute-virtual-interfaces", "vif0");
    let table = Table::start(&options, MeshOptions::default());
    let rerouted = guest(&table.meshed, &table.plain, "vif0");
    for ipv6 in [false, true] {
        let to = table.plain.address(ipv6);
        // The proxy connects from inside the pod.
        table.request(
            "guest",
            &rerouted,
            app(to),
            table.meshed.address(ipv6),
            outbound(),
        );
        let (seen, counts) = table.during(|| datagram(&rerouted, app(to), ANSWER));
        let address: IpAddr = if ipv6 {
            "fd09::2".parse().unwrap()
        } else {
            "10.9.0.2".parse().unwrap()
        };
        assert_eq!((seen.unwrap().ip(), counts), (address, untouched()));
    }
}
