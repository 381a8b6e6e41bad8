//! One connection to an application, for as many requests as wanted.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use super::client::{Head, REQUEST};
use super::server::Seen;
use crate::netns::Netns;

/// A connection to an [`EchoServer`](super::server::EchoServer). Between requests it is silent.
#[derive(Debug)]
pub struct Connection(BufReader<TcpStream>);

impl Connection {
    /// Connects from inside `netns`; this and each answer may take `timeout`.
    pub fn open(netns: &Netns, target: SocketAddr, timeout: Duration) -> io::Result<Self> {
        let stream = netns.run(|| TcpStream::connect_timeout(&target, timeout))?;
        stream.set_read_timeout(Some(timeout))?;
        Ok(Self(BufReader::new(stream)))
    }

    /// Sends a request and reads the answer.
    pub fn ask(&mut self) -> io::Result<Seen> {
        self.0.get_mut().write_all(REQUEST)?;
        let mut head = Head::default();
        let mut line = String::new();
        while !head.complete {
            line.clear();
            self.0.read_line(&mut line)?;
            head.take(&line)?;
        }
        let mut body = vec![0; head.length];
        self.0.read_exact(&mut body)?;
        Ok(serde_json::from_slice(&body)?)
    }

    /// Its end in `netns`.
    pub fn local(&self) -> io::Result<SocketAddr> {
        self.0.get_ref().local_addr()
    }
}
