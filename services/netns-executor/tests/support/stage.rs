//! A pod and what is outside of it. Whoever answers a connection says who it is first.
#![allow(dead_code, reason = "each test binary uses what it needs")]
#![allow(clippy::unwrap_used, reason = "a test ends with the first surprise")]

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use crate::netns::Netns;

/// Where the pod's connections go.
pub(crate) const REMOTES: [&str; 2] = ["192.0.2.1:80", "[2001:db8::1]:80"];
/// The application in the pod.
pub(crate) const APPS: [&str; 2] = ["10.0.0.2:8080", "[fd00::2]:8080"];

const ANSWER: Duration = Duration::from_secs(5);

/// The proxy and the servers are threads that say their name and then echo.
pub(crate) struct Stage {
    pub(crate) pod: Netns,
    pub(crate) peer: Netns,
}

impl Stage {
    pub(crate) fn new() -> Self {
        let (pod, peer) = (Netns::new(), Netns::new());
        pod.veth("eth0", &peer, "p0");
        pod.sh("ip addr add 10.0.0.2/24 dev eth0; ip route add default via 10.0.0.1");
        pod.sh("ip addr add fd00::2/64 dev eth0 nodad; ip -6 route add default via fd00::1");
        peer.sh("ip addr add 10.0.0.1/24 dev p0; ip addr add 192.0.2.1/32 dev lo");
        peer.sh("ip addr add fd00::1/64 dev p0 nodad; ip addr add 2001:db8::1/128 dev lo nodad");
        serve(&pod, "[::]:15001", b'o');
        serve(&pod, "[::]:15006", b'i');
        serve(&pod, "[::]:8080", b'a');
        serve(&peer, "[::]:80", b'p');
        Self { pod, peer }
    }

    /// Opens a connection from the pod to the outside.
    pub(crate) fn outbound(&self) -> Talk {
        self.pod.run(|| Talk::open(REMOTES[0]))
    }

    /// Opens a connection from outside to the application in the pod.
    pub(crate) fn inbound(&self) -> Talk {
        self.peer.run(|| Talk::open(APPS[0]))
    }

    /// Opens one each way in each family.
    pub(crate) fn all_ways(&self) -> Vec<Talk> {
        let out = |to: &str| self.pod.run(|| Talk::open(to));
        let into = |to: &str| self.peer.run(|| Talk::open(to));
        REMOTES.map(out).into_iter().chain(APPS.map(into)).collect()
    }
}

fn serve(netns: &Netns, address: &str, name: u8) {
    let listener = netns.run(|| TcpListener::bind(address).unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || {
                let mut stream = stream;
                let _ = stream.write_all(&[name]);
                let mut byte = [0];
                while stream.read_exact(&mut byte).is_ok() && stream.write_all(&byte).is_ok() {}
            });
        }
    });
}

/// A connection and who answered it.
pub(crate) struct Talk {
    pub(crate) stream: TcpStream,
    pub(crate) with: char,
}

impl Talk {
    pub(crate) fn open(address: &str) -> Self {
        let address: SocketAddr = address.parse().unwrap();
        Self::over(TcpStream::connect_timeout(&address, ANSWER).unwrap())
    }

    /// Over a connection that was opened otherwise.
    pub(crate) fn over(mut stream: TcpStream) -> Self {
        stream.set_read_timeout(Some(ANSWER)).unwrap();
        let mut name = [0];
        stream.read_exact(&mut name).unwrap();
        Self {
            stream,
            with: char::from(name[0]),
        }
    }

    pub(crate) fn assert_alive(&mut self, when: &str) {
        self.speak().unwrap_or_else(|error| panic!("{when}: {error}"));
    }

    pub(crate) fn speak(&mut self) -> std::io::Result<()> {
        self.stream.write_all(b"x")?;
        self.stream.read_exact(&mut [0])
    }
}
