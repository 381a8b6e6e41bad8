//! A simulated node: a netns that plays the host's, with a bridge, and a mount namespace for its netns files.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context;
use sluice_proto::paths::RunDir;
use tempfile::TempDir;

use crate::netlink::RouteSocket;
use crate::netns::{MountNs, Netns, Place};
use crate::pod::{PodBuilder, lock};
use crate::wait::poll_until;

/// Name of the bridge that pods are attached to.
pub const BRIDGE: &str = "cni0";
/// The bridge's IPv4 address and prefix length; pods are in the same subnet.
pub const BRIDGE_V4: (Ipv4Addr, u8) = (Ipv4Addr::new(10, 244, 0, 1), 16);
/// The bridge's IPv6 address and prefix length.
pub const BRIDGE_V6: (Ipv6Addr, u8) = (Ipv6Addr::new(0xfd00, 0x10, 0x244, 0, 0, 0, 0, 1), 64);

const HOST_NETNS: &str = "host-netns";

/// A simulated node. Clones are handles to the same node; the last one takes it down.
#[derive(Debug, Clone)]
pub struct Node(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    place: Place,
    netns: Netns,
    bridge: u32,
    route: Mutex<RouteSocket>,
    dir: TempDir,
    pods: AtomicU32,
}

impl Node {
    /// Makes a node with `lo` and the bridge up, both address families, forwarding on. Needs root.
    pub fn new() -> anyhow::Result<Self> {
        let netns = Netns::new().context("making the node's netns (root is needed)")?;
        let place = Place {
            net: Some(netns.clone()),
            mount: Some(MountNs::new().context("making a mount namespace")?),
        };
        let dir = tempfile::Builder::new()
            .prefix("sluice-node-")
            .tempdir_in(volatile_dir())?;
        // The broker has a uid of its own and must get through to its directories.
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755))?;
        std::fs::create_dir(dir.path().join("netns"))?;
        place
            .mount_own_netns_at(&dir.path().join(HOST_NETNS))
            .context("mounting the node's netns")?;
        let (route, bridge) = netns.run(|| -> anyhow::Result<_> {
            for (key, value) in [
                ("ipv4/ip_forward", "1"),
                ("ipv6/conf/all/forwarding", "1"),
                ("ipv6/conf/default/accept_dad", "0"),
            ] {
                std::fs::write(Path::new("/proc/sys/net").join(key), value)
                    .with_context(|| format!("sysctl {key}"))?;
            }
            let route = RouteSocket::open()?;
            route.set_up(1, true)?; // the loopback interface is always number 1
            let bridge = route.create_bridge(BRIDGE)?;
            route.add_address(bridge, BRIDGE_V4.0.into(), BRIDGE_V4.1)?;
            route.add_address(bridge, BRIDGE_V6.0.into(), BRIDGE_V6.1)?;
            Ok((route, bridge))
        })?;
        Ok(Self(Arc::new(Inner {
            place,
            netns,
            bridge,
            route: Mutex::new(route),
            dir,
            pods: AtomicU32::new(0),
        })))
    }

    /// The netns that plays the host's.
    pub fn netns(&self) -> &Netns {
        &self.0.netns
    }

    /// Where the netns that plays the host's is mounted, in the node's mount namespace only.
    pub fn netns_path(&self) -> PathBuf {
        self.dir().join(HOST_NETNS)
    }

    /// Both namespaces: where the container runtime and its plugins run.
    pub fn place(&self) -> &Place {
        &self.0.place
    }

    /// The node's mounts with another netns: where a service without host network runs.
    pub fn place_with(&self, netns: &Netns) -> Place {
        Place {
            net: Some(netns.clone()),
            mount: self.0.place.mount.clone(),
        }
    }

    /// A directory of the node's own, removed with it. World-readable.
    pub fn dir(&self) -> &Path {
        self.0.dir.path()
    }

    /// Where netns files are mounted. The mounts exist in the node's mount namespace only.
    pub fn netns_dir(&self) -> PathBuf {
        self.dir().join("netns")
    }

    /// The paths below the run directory; see [`Node::prepare_run_dir`].
    pub fn run_dir(&self) -> RunDir {
        RunDir::new(self.dir().join("run"))
    }

    /// Makes the run directories with the owners and modes that executor and installer give them.
    pub fn prepare_run_dir(&self) -> anyhow::Result<RunDir> {
        crate::rundir::prepare(&self.run_dir())?;
        Ok(self.run_dir())
    }

    /// A new pod, not yet made.
    pub fn pod(&self, name: &str) -> PodBuilder {
        PodBuilder::new(self.clone(), name)
    }

    /// Names of the interfaces in the node's netns.
    pub fn interfaces(&self) -> std::io::Result<Vec<String>> {
        self.0.netns.run(|| {
            let names = nix::net::if_::if_nameindex()?;
            Ok(names
                .iter()
                .map(|i| i.name().to_string_lossy().into_owned())
                .collect())
        })
    }

    /// Waits until the bridge has heard nothing for `lull`. Pods that were just made speak of themselves for some seconds
    /// (multicast listener reports, duplicate address detection), and every other pod of the node hears it.
    pub fn wait_quiet(&self, lull: Duration, within: Duration) -> anyhow::Result<()> {
        let mut heard = (self.bridge_frames()?, Instant::now());
        poll_until("the bridge is quiet", within, || {
            let frames = self.bridge_frames().ok()?;
            if frames != heard.0 {
                heard = (frames, Instant::now());
            }
            (heard.1.elapsed() >= lull).then_some(())
        })?;
        Ok(())
    }

    /// How many frames the bridge itself has received.
    fn bridge_frames(&self) -> anyhow::Result<u64> {
        // Each line: the interface's name, a colon, bytes, packets, ... (net/core/net-procfs.c).
        let table = self
            .0
            .netns
            .run(|| std::fs::read_to_string("/proc/thread-self/net/dev"))?;
        let line = table
            .lines()
            .find_map(|line| line.trim_start().strip_prefix(BRIDGE)?.strip_prefix(':'));
        let packets = line
            .and_then(|line| line.split_whitespace().nth(1))
            .context("no line of the bridge")?;
        Ok(packets.parse()?)
    }

    pub(crate) fn bridge_index(&self) -> u32 {
        self.0.bridge
    }

    /// A netlink socket carries one request at a time.
    pub(crate) fn with_route<T>(&self, f: impl FnOnce(&RouteSocket) -> T) -> T {
        f(&lock(&self.0.route))
    }

    /// The number of the next pod, from 0.
    pub(crate) fn next_pod(&self) -> u32 {
        self.0.pods.fetch_add(1, Ordering::Relaxed)
    }
}

/// A tmpfs if there is one: run directories are on one, and making a file elsewhere takes a hundred times as long.
fn volatile_dir() -> PathBuf {
    let shared_memory = PathBuf::from("/dev/shm");
    let is_tmpfs = nix::sys::statfs::statfs(&shared_memory)
        .is_ok_and(|fs| fs.filesystem_type() == nix::sys::statfs::TMPFS_MAGIC);
    if is_tmpfs {
        shared_memory
    } else {
        std::env::temp_dir()
    }
}

/// The addresses of pod `number`: `.0.1` is the bridge, pods start at `.0.10`.
pub(crate) fn pod_addresses(number: u32) -> (IpAddr, IpAddr) {
    let host = number + 10;
    let v4 = Ipv4Addr::from_bits(u32::from(BRIDGE_V4.0) & 0xffff_0000 | host & 0xffff);
    let v6 = Ipv6Addr::from_bits(u128::from(BRIDGE_V6.0) & !0xffff | u128::from(host));
    (v4.into(), v6.into())
}
