//! Unix socket listeners that exist either completely (bound, with mode and group) or not at all, and peers.

use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Who may connect to a socket. The mode is the first gate, [`PeerPolicy::check`] the second.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerPolicy {
    /// uids that are served.
    pub uids: Vec<u32>,
}

/// The process at the other end (`SO_PEERCRED`, unix(7)), as it was when it connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Its effective uid.
    pub uid: u32,
    /// Its effective gid.
    pub gid: u32,
    /// Its pid; 0 if it lives in a pid namespace that we do not see. For logs only.
    pub pid: i32,
}

/// A peer that is not served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("peer with uid {uid} (pid {pid}) is refused: allowed are the uids {allowed:?}")]
pub struct PeerRefused {
    /// Its uid.
    pub uid: u32,
    /// Its pid.
    pub pid: i32,
    /// Who is served.
    pub allowed: Vec<u32>,
}

impl Peer {
    /// Asks the kernel who is at the other end of `socket`.
    pub fn of(socket: impl AsFd) -> std::io::Result<Self> {
        let credentials = nix::sys::socket::getsockopt(&socket, nix::sys::socket::sockopt::PeerCredentials)?;
        Ok(Self {
            uid: credentials.uid(),
            gid: credentials.gid(),
            pid: credentials.pid(),
        })
    }

    /// Whether it lives in a PID namespace that we do not see: to a process in a container, a process of another one.
    pub fn is_elsewhere(self) -> bool {
        self.pid == 0
    }
}

impl PeerPolicy {
    /// Serves only these uids.
    pub fn uids(uids: impl Into<Vec<u32>>) -> Self {
        Self { uids: uids.into() }
    }

    /// Whether `peer` is served.
    pub fn check(&self, peer: Peer) -> Result<(), PeerRefused> {
        if self.uids.contains(&peer.uid) {
            return Ok(());
        }
        Err(PeerRefused {
            uid: peer.uid,
            pid: peer.pid,
            allowed: self.uids.clone(),
        })
    }
}

/// A socket could not be set up.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} socket {}", path.display())]
pub struct BindError {
    /// What was being done.
    pub action: &'static str,
    /// The socket.
    pub path: PathBuf,
    /// Why it failed.
    #[source]
    pub source: std::io::Error,
}

/// Why a path is not free.
#[derive(Debug, thiserror::Error)]
enum Occupied {
    #[error("process {} (uid {}) listens there", .0.pid, .0.uid)]
    By(Peer),
    #[error("a process that cannot be seen from here listens there")]
    Unseen,
}

/// Fails if somebody listens at `path`. [`bind_at`] would take the path from a listener, and two processes would go on
/// with one task; for all but sockets that are meant to be taken over this is asked first.
///
/// It is found out by connecting: a listener sees a peer that hangs up at once.
pub fn check_free(path: &Path) -> Result<(), BindError> {
    let Some(occupied) = occupied(path) else {
        return Ok(());
    };
    Err(BindError {
        action: "bind",
        path: path.to_owned(),
        source: std::io::Error::new(std::io::ErrorKind::AddrInUse, occupied),
    })
}

fn occupied(path: &Path) -> Option<Occupied> {
    let address = SocketAddrUnix::new(path).ok()?;
    for kind in [SocketType::STREAM, SocketType::SEQPACKET, SocketType::DGRAM] {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).ok()?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) => {
                let owner = Peer::of(&socket).ok().filter(|owner| !owner.is_elsewhere());
                return Some(owner.map_or(Occupied::Unseen, Occupied::By));
            }
            // A socket of another type.
            Err(Errno::PROTOTYPE) => {}
            // More wait than it has room for.
            Err(Errno::AGAIN) => return Some(Occupied::Unseen),
            // Nothing is there, or nobody any more.
            Err(_) => return None,
        }
    }
    None
}

/// Makes a socket at `path` appear with its mode and group in one step: `bind` is called with a temporary name in
/// the same directory, which is then given mode and group and renamed over whatever is at `path`.
///
/// A listener that is replaced this way keeps its own (now nameless) socket until it closes it.
pub fn bind_at<L>(
    path: &Path,
    mode: u32,
    group: Option<u32>,
    bind: impl FnOnce(&Path) -> std::io::Result<L>,
) -> Result<L, BindError> {
    let fail = |action| {
        let path = path.to_owned();
        move |source| BindError { action, path, source }
    };
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}", std::process::id()));
    let temporary = PathBuf::from(temporary);
    match std::fs::remove_file(&temporary) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(fail("replace the temporary name of")(error)),
    }
    let listener = bind(&temporary).map_err(fail("bind"))?;
    if group.is_some() {
        chown(&temporary, None, group).map_err(fail("set the group of"))?;
    }
    std::fs::set_permissions(&temporary, std::fs::Permissions::from_mode(mode))
        .map_err(fail("set the mode of"))?;
    std::fs::rename(&temporary, path).map_err(fail("rename"))?;
    Ok(listener)
}

/// Binds a stream listener at `path` with `mode` and `group`. Call it inside a tokio runtime.
pub fn bind_stream(
    path: &Path,
    mode: u32,
    group: Option<u32>,
) -> Result<tokio::net::UnixListener, BindError> {
    bind_at(path, mode, group, |temporary| {
        let listener = std::os::unix::net::UnixListener::bind(temporary)?;
        listener.set_nonblocking(true)?;
        tokio::net::UnixListener::from_std(listener)
    })
}
