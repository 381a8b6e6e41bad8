//! Connections of a pod that runs while redirections come: conntrack is told of them, by ourselves, and shows them to
//! its own tool. Needs root.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test ends with the first surprise"
)]

#[path = "support/netns.rs"]
mod netns;
#[path = "support/stage.rs"]
mod stage;

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use netns::Netns;
use sluice_netns_executor::netlink::diagnostics::{Connection, TcpState, connections};
use sluice_netns_executor::netlink::{DiagnosticSocket, Tracked, apply, track};
use sluice_proto::ambient::{AmbientOptions, Desired};
use socket2::{Domain, SockRef, Socket, Type};
use stage::{APPS, REMOTES, Stage, Talk};

fn draining() -> Desired {
    Desired::Draining(AmbientOptions::default())
}

fn ambient() -> Desired {
    Desired::Ambient(AmbientOptions::default())
}

fn listed(netns: &Netns) -> Vec<Connection> {
    let socket = netns.run(|| DiagnosticSocket::open().unwrap());
    connections(&socket).unwrap()
}

impl Stage {
    /// Enrols the pod as the executor does.
    fn enrol(&self) -> Tracked {
        let sockets = self.pod.sockets();
        apply(&sockets, &draining()).unwrap();
        let tracked = track::track(&sockets.netfilter, &listed(&self.pod));
        apply(&sockets, &ambient()).unwrap();
        tracked
    }

    fn assert_new_ones_are_redirected(&self) {
        let with: String = self.all_ways().iter().map(|talk| talk.with).collect();
        assert_eq!(with, "ooii");
    }

    /// What conntrack knows, as its own tool prints it, without time-outs.
    fn entries(&self) -> Vec<String> {
        let text = self
            .pod
            .sh("conntrack -L -p tcp -f ipv4 2>/dev/null; conntrack -L -p tcp -f ipv6 2>/dev/null");
        let line = |line: &str| {
            let words: Vec<_> = line.split_whitespace().collect();
            assert_eq!(words[..2], ["tcp", "6"], "{line}");
            words[3..].join(" ")
        };
        text.lines().map(line).collect()
    }
}

/// An entry in both directions, untranslated.
fn entry(state: &str, from: SocketAddr, to: SocketAddr) -> String {
    let tuple = |from: SocketAddr, to: SocketAddr| {
        format!(
            "src={} dst={} sport={} dport={}",
            from.ip(),
            to.ip(),
            from.port(),
            to.port()
        )
    };
    format!(
        "{state} {} {} [ASSURED] mark=0 use=1",
        tuple(from, to),
        tuple(to, from)
    )
}

#[test]
fn silent_connections_stay_direct_and_new_ones_are_redirected() {
    let stage = Stage::new();
    let mut silent = stage.all_ways();
    let tracked = stage.enrol();
    assert_eq!((tracked.refused, tracked.reason), (0, None));
    let entries = stage.entries();
    for talk in &silent {
        let (from, to) = (
            talk.stream.local_addr().unwrap(),
            talk.stream.peer_addr().unwrap(),
        );
        let expected = entry("ESTABLISHED", from, to);
        assert!(entries.contains(&expected), "{expected} is not in {entries:#?}");
    }
    for talk in &mut silent {
        talk.assert_alive("enrolled");
    }
    stage.assert_new_ones_are_redirected();
    // Out and in again: they still are what they were.
    let sockets = stage.pod.sockets();
    apply(&sockets, &Desired::None).unwrap();
    for talk in &mut silent {
        talk.assert_alive("out");
    }
    stage.enrol();
    for talk in &mut silent {
        talk.assert_alive("in again");
    }
    stage.assert_new_ones_are_redirected();
}

#[test]
fn what_conntrack_is_not_told_of_is_lost() {
    let stage = Stage::new();
    let mut silent = stage.all_ways();
    let sockets = stage.pod.sockets();
    apply(&sockets, &draining()).unwrap();
    apply(&sockets, &ambient()).unwrap();
    // From the outside a connection stands until the pod speaks.
    for talk in &mut silent[..2] {
        talk.speak().unwrap_err();
    }
}

#[test]
fn what_conntrack_knows_stays_as_it_is() {
    let stage = Stage::new();
    let sockets = stage.pod.sockets();
    apply(&sockets, &draining()).unwrap();
    let mut seen = stage.all_ways();
    let before = stage.entries();
    assert_eq!(before.len(), seen.len());
    let tracked = track::track(&sockets.netfilter, &listed(&stage.pod));
    assert_eq!((tracked.made, tracked.refused), (0, 0));
    assert!(tracked.known >= 4, "{tracked:?}");
    assert_eq!(stage.entries(), before);
    // The proxy's own, too: both ends of what was redirected, and what the proxy itself opened.
    apply(&sockets, &ambient()).unwrap();
    let redirected = stage.all_ways();
    apply(&sockets, &draining()).unwrap();
    let before = stage.entries();
    let tracked = track::track(&sockets.netfilter, &listed(&stage.pod));
    assert_eq!((tracked.made, tracked.refused), (0, 0), "{before:#?}");
    assert_eq!(stage.entries(), before);
    for talk in seen.iter_mut().chain(&mut { redirected }) {
        talk.assert_alive("kept");
    }
}

#[test]
fn thousands_are_listed_and_made_known_and_one_that_is_refused_disturbs_no_other() {
    const MANY: usize = 3000;
    let stage = Stage::new();
    let listener = stage.peer.run(|| TcpListener::bind("192.0.2.1:81").unwrap());
    let accepting = std::thread::spawn(move || {
        let accepted: Vec<_> = listener.incoming().take(MANY).map(Result::unwrap).collect();
        accepted
    });
    let opened = stage.pod.run(|| {
        let opened: Vec<_> = (0..MANY)
            .map(|_| TcpStream::connect("192.0.2.1:81").unwrap())
            .collect();
        opened
    });
    let _accepted = accepting.join().unwrap();
    let sockets = stage.pod.sockets();
    apply(&sockets, &draining()).unwrap();
    let mut all = listed(&stage.pod);
    assert_eq!(all.len(), MANY);
    // Two families in one connection.
    let bad = Connection {
        local: "10.0.0.2:1".parse().unwrap(),
        remote: "[fd00::1]:1".parse().unwrap(),
        state: TcpState::Established,
        inbound: false,
    };
    all.insert(MANY / 2, bad);
    all.push(bad);
    let tracked = track::track(&sockets.netfilter, &all);
    assert_eq!(
        (tracked.made as usize, tracked.known, tracked.refused),
        (MANY, 0, 2)
    );
    assert!(tracked.reason.unwrap().contains("refused a connection"));
    assert_eq!(stage.entries().len(), MANY);
    let again = track::track(&sockets.netfilter, &all);
    assert_eq!((again.made, again.known as usize, again.refused), (0, MANY, 2));
    drop(opened);
}

/// Connects from a port of one's choice.
fn dial(netns: &Netns, from: SocketAddr, to: SocketAddr) -> TcpStream {
    netns.run(|| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.set_reuse_address(true).unwrap();
        socket.bind(&from.into()).unwrap();
        socket.connect(&to.into()).unwrap();
        socket.into()
    })
}

/// Waits until a connection of the pod is in this state.
fn wait_for(stage: &Stage, local: SocketAddr, state: TcpState) {
    let deadline = Instant::now() + Duration::from_secs(5);
    let is_there = |c: &Connection| c.local == local && c.state == state;
    while !listed(&stage.pod).iter().any(is_there) {
        assert!(
            Instant::now() < deadline,
            "{local} {state:?}: {:?}",
            listed(&stage.pod)
        );
        std::thread::yield_now();
    }
}

#[test]
fn a_connection_that_one_side_has_ended_goes_on() {
    let stage = Stage::new();
    let listener = stage.peer.run(|| TcpListener::bind("192.0.2.1:81").unwrap());
    let mut says_no_more = stage.pod.run(|| TcpStream::connect("192.0.2.1:81").unwrap());
    let (mut still_speaks, _) = listener.accept().unwrap();
    says_no_more.shutdown(Shutdown::Write).unwrap();
    assert_eq!(still_speaks.read(&mut [0]).unwrap(), 0);
    let local = says_no_more.local_addr().unwrap();
    wait_for(&stage, local, TcpState::HalfClosed);
    stage.enrol();
    let expected = entry("CLOSE_WAIT", local, says_no_more.peer_addr().unwrap());
    let entries = stage.entries();
    assert!(entries.contains(&expected), "{expected} is not in {entries:#?}");
    still_speaks.write_all(b"y").unwrap();
    assert_eq!(says_no_more.read(&mut [0]).unwrap(), 1);
    drop(still_speaks);
    assert_eq!(says_no_more.read(&mut [0]).unwrap(), 0);
}

#[test]
fn ports_of_a_connection_that_has_ended_lead_to_the_proxy() {
    let stage = Stage::new();
    let [aborted, closed]: [SocketAddr; 2] = ["10.0.0.1:5555", "10.0.0.1:5556"].map(|a| a.parse().unwrap());
    let app: SocketAddr = APPS[0].parse().unwrap();
    let other: SocketAddr = "10.0.0.2:8081".parse().unwrap();
    let listener = stage.pod.run(|| TcpListener::bind(other).unwrap());
    let mut closing = dial(&stage.peer, closed, other);
    let (accepted, _) = listener.accept().unwrap();
    accepted.shutdown(Shutdown::Write).unwrap();
    assert_eq!(closing.read(&mut [0]).unwrap(), 0);
    wait_for(&stage, other, TcpState::HalfClosed);
    let mut talk = Talk::over(dial(&stage.peer, aborted, app));
    assert_eq!(talk.with, 'a');
    stage.enrol();
    let entries = stage.entries();
    for expected in [
        entry("CLOSE_WAIT", closed, other),
        entry("ESTABLISHED", aborted, app),
    ] {
        assert!(entries.contains(&expected), "{expected} is not in {entries:#?}");
    }
    talk.assert_alive("enrolled");
    // One ends by a reset, one in good order and last on the side whose port it is, so that both ports are free at once.
    SockRef::from(&talk.stream)
        .set_linger(Some(Duration::ZERO))
        .unwrap();
    drop((talk, closing));
    for (from, to) in [(aborted, app), (closed, other)] {
        assert_eq!(Talk::over(dial(&stage.peer, from, to)).with, 'i', "{from}");
    }
}

#[test]
fn a_connection_that_is_just_being_opened_stays_direct() {
    let stage = Stage::new();
    // No handshake ends: what the pod sends does not arrive.
    stage.peer.sh("nft add table ip hold; nft add chain ip hold in '{ type filter hook prerouting priority -400; policy drop; }'");
    let open = |netns: &Netns, to: &'static str| {
        netns.run(|| {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            socket.set_nonblocking(true).unwrap();
            socket
                .connect(&to.parse::<SocketAddr>().unwrap().into())
                .unwrap_err();
            socket
        })
    };
    let (outbound, inbound) = (open(&stage.pod, REMOTES[0]), open(&stage.peer, APPS[0]));
    let states = || {
        let mut states: Vec<_> = listed(&stage.pod).iter().map(|c| c.state).collect();
        states.sort_by_key(|state| *state as u8);
        states
    };
    let deadline = Instant::now() + Duration::from_secs(5);
    while states() != [TcpState::SynSent, TcpState::SynReceived] {
        assert!(Instant::now() < deadline, "{:?}", states());
        std::thread::yield_now();
    }
    let tracked = stage.enrol();
    assert_eq!(
        (tracked.made + tracked.known, tracked.refused),
        (2, 0),
        "{tracked:?}"
    );
    stage.peer.sh("nft delete table ip hold");
    for (socket, with) in [(outbound, 'p'), (inbound, 'a')] {
        socket.set_nonblocking(false).unwrap();
        assert_eq!(Talk::over(socket.into()).with, with);
    }
    stage.assert_new_ones_are_redirected();
}
