//! Whose a TCP port is, for the message that it is taken.

use std::fmt;
use std::fs;

/// `TCP_LISTEN`, as `/proc/net/tcp` writes it (proc_net_tcp in the kernel's documentation).
const LISTENING: &str = "0A";

/// Who listens on a port of our network namespace, as far as it can be seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortOwner {
    uid: Option<u32>,
    pid: Option<u32>,
}

impl PortOwner {
    /// Looks for who listens on `port`, whatever the address. Another user's process shows its uid, but not its pid.
    pub(crate) fn of(port: u16) -> Self {
        let found = ["/proc/net/tcp", "/proc/net/tcp6"]
            .iter()
            .filter_map(|table| fs::read_to_string(table).ok())
            .find_map(|table| table.lines().find_map(|line| listener(line, port)));
        let (uid, inode) = found.unzip();
        Self {
            uid,
            pid: inode.and_then(holder),
        }
    }
}

impl fmt::Display for PortOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.pid, self.uid) {
            (Some(pid), Some(uid)) => write!(f, ", where process {pid} (uid {uid}) listens"),
            (None, Some(uid)) => write!(f, ", where a process of uid {uid} listens"),
            _ => Ok(()),
        }
    }
}

/// The uid and the inode of the socket that a line is about, if it listens on `port`.
fn listener(line: &str, port: u16) -> Option<(u32, u64)> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let (_, local_port) = fields.get(1)?.rsplit_once(':')?;
    let listens = fields.get(3) == Some(&LISTENING) && u16::from_str_radix(local_port, 16) == Ok(port);
    if !listens {
        return None;
    }
    Some((fields.get(7)?.parse().ok()?, fields.get(9)?.parse().ok()?))
}

/// A process that has the socket open, among those whose descriptors we may see.
fn holder(inode: u64) -> Option<u32> {
    let wanted = format!("socket:[{inode}]");
    let pids = fs::read_dir("/proc").ok()?.flatten();
    let mut pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.find(|pid| {
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd"))
            .into_iter()
            .flatten()
            .flatten();
        let mut targets = descriptors.filter_map(|entry| fs::read_link(entry.path()).ok());
        targets.any(|target| target.as_os_str() == wanted.as_str())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_found_by_its_port_and_a_connection_is_not_one() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let listener = std::net::TcpListener::bind(address).unwrap();
            let address = listener.local_addr().unwrap();
            let connection = std::net::TcpStream::connect(address).unwrap();
            let owner = PortOwner::of(address.port());
            let (pid, uid) = (std::process::id(), nix::unistd::geteuid().as_raw());
            assert_eq!(
                owner.to_string(),
                format!(", where process {pid} (uid {uid}) listens")
            );
            drop(listener);
            let own = connection.local_addr().unwrap().port();
            assert_eq!(PortOwner::of(own).to_string(), "");
        }
    }
}
