//! A simulated pod sandbox: a netns wired to the node's bridge, as the runtime and the primary CNI plugin leave it.

use std::fmt::Write as _;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use anyhow::Context;
use serde_json::{Value, json};

use crate::cgroup::PodCgroup;
use crate::netlink::{RouteSocket, VethEnd};
use crate::netns::{Netns, Place};
use crate::node::{BRIDGE, BRIDGE_V4, BRIDGE_V6, Node, pod_addresses};
use crate::process::{Process, Spawn};

/// What a pod will be; finish with [`PodBuilder::create`] or [`PodBuilder::create_unwired`].
#[derive(Debug, Clone)]
pub struct PodBuilder {
    node: Node,
    name: String,
    namespace: String,
    uid: Option<String>,
    container_id: Option<String>,
    ipv4: bool,
    ipv6: bool,
    addresses: Option<Vec<IpAddr>>,
    disable_ipv6: bool,
}

impl PodBuilder {
    pub(crate) fn new(node: Node, name: &str) -> Self {
        Self {
            node,
            name: name.to_owned(),
            namespace: "default".to_owned(),
            uid: None,
            container_id: None,
            ipv4: true,
            ipv6: false,
            addresses: None,
            disable_ipv6: false,
        }
    }

    /// Kubernetes namespace; default `default`.
    #[must_use]
    pub fn namespace(mut self, namespace: &str) -> Self {
        namespace.clone_into(&mut self.namespace);
        self
    }

    /// Pod UID; default a random one.
    #[must_use]
    pub fn uid(mut self, uid: &str) -> Self {
        self.uid = Some(uid.to_owned());
        self
    }

    /// Container id of the sandbox; default a random one of 64 hexadecimal digits.
    #[must_use]
    pub fn container_id(mut self, id: &str) -> Self {
        self.container_id = Some(id.to_owned());
        self
    }

    /// Which address families the pod gets; default IPv4 only.
    #[must_use]
    pub fn families(mut self, ipv4: bool, ipv6: bool) -> Self {
        self.ipv4 = ipv4;
        self.ipv6 = ipv6;
        self
    }

    /// IPv4 and IPv6.
    #[must_use]
    pub fn dual_stack(self) -> Self {
        self.families(true, true)
    }

    /// These addresses instead of the next free ones; they must lie in the bridge's subnets.
    #[must_use]
    pub fn addresses(mut self, addresses: &[IpAddr]) -> Self {
        self.addresses = Some(addresses.to_vec());
        self
    }

    /// Switches IPv6 off inside (`disable_ipv6` for all, default and lo).
    #[must_use]
    pub fn disable_ipv6(mut self) -> Self {
        self.disable_ipv6 = true;
        self.ipv6 = false;
        self
    }

    /// Makes the sandbox with its veth, addresses and default routes.
    pub fn create(self) -> anyhow::Result<Pod> {
        let name = self.name.clone();
        self.make(true).with_context(|| format!("making pod {name}"))
    }

    /// Makes the sandbox only, `lo` down: for chains whose first plugin wires the pod.
    pub fn create_unwired(self) -> anyhow::Result<Pod> {
        let name = self.name.clone();
        self.make(false)
            .with_context(|| format!("making the sandbox of pod {name}"))
    }

    fn make(self, wired: bool) -> anyhow::Result<Pod> {
        let number = self.node.next_pod();
        let uid = self.uid.map_or_else(random_uuid, Ok)?;
        let container_id = match self.container_id {
            Some(id) => id,
            None => format!("{}{}", random_uuid()?, random_uuid()?).replace('-', ""),
        };
        let netns_path = self.node.netns_dir().join(format!("cni-{}", random_uuid()?));
        let disable_ipv6 = self.disable_ipv6;
        let (netns, route) = self.node.place().new_netns_at(&netns_path, |_| {
            if disable_ipv6 {
                for conf in ["all", "default", "lo"] {
                    std::fs::write(format!("/proc/sys/net/ipv6/conf/{conf}/disable_ipv6"), "1")?;
                }
            }
            // Nobody is a router here that would answer, and each solicitation would be heard by all pods of the node: with
            // hundreds of them, that is most of what the machine does.
            std::fs::write("/proc/sys/net/ipv6/conf/default/router_solicitations", "0")?;
            let route = RouteSocket::open()?;
            if wired {
                route.set_up(1, true)?;
            }
            Ok(route)
        })?;
        let addresses = if wired {
            chosen(self.addresses, number, self.ipv4, self.ipv6)
        } else {
            Vec::new()
        };
        let pod = Pod {
            node: self.node,
            name: self.name,
            namespace: self.namespace,
            uid,
            container_id,
            netns,
            netns_path,
            host_ifname: format!("veth{number}"),
            number,
            addresses,
            cgroup: Mutex::new(None),
            processes: Mutex::new(Vec::new()),
            mounted: true,
        };
        if wired {
            pod.wire(&route)?;
        }
        Ok(pod)
    }
}

fn chosen(fixed: Option<Vec<IpAddr>>, number: u32, ipv4: bool, ipv6: bool) -> Vec<IpAddr> {
    let (v4, v6) = pod_addresses(number);
    fixed.unwrap_or_else(|| {
        [(ipv4, v4), (ipv6, v6)]
            .iter()
            .filter(|(on, _)| *on)
            .map(|(_, a)| *a)
            .collect()
    })
}

/// A pod sandbox. Dropping it does what [`Pod::delete`] does.
#[derive(Debug)]
pub struct Pod {
    node: Node,
    name: String,
    namespace: String,
    uid: String,
    container_id: String,
    netns: Netns,
    netns_path: PathBuf,
    host_ifname: String,
    number: u32,
    addresses: Vec<IpAddr>,
    cgroup: Mutex<Option<PodCgroup>>,
    processes: Mutex<Vec<Process>>,
    mounted: bool,
}

impl Pod {
    /// Pod name.
    pub fn name(&self) -> &str {
        &self.name
    }
    /// Kubernetes namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }
    /// Pod UID.
    pub fn uid(&self) -> &str {
        &self.uid
    }
    /// Container id of the sandbox.
    pub fn container_id(&self) -> &str {
        &self.container_id
    }
    /// The pod's netns. A clone that is kept keeps the netns alive.
    pub fn netns(&self) -> &Netns {
        &self.netns
    }
    /// `CNI_NETNS`; a mount that only the node's mount namespace has.
    pub fn netns_path(&self) -> &Path {
        &self.netns_path
    }
    /// The node's end of the veth pair.
    pub fn host_ifname(&self) -> &str {
        &self.host_ifname
    }
    /// All addresses, IPv4 first.
    pub fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }
    /// The first address of a family.
    ///
    /// # Panics
    /// If the pod has none.
    pub fn address(&self, ipv6: bool) -> IpAddr {
        let found = self.addresses.iter().find(|a| a.is_ipv6() == ipv6);
        *found.unwrap_or_else(|| panic!("pod {} has no such address: {:?}", self.name, self.addresses))
    }
    /// The first address.
    pub fn ip(&self) -> IpAddr {
        self.address(!self.addresses.iter().any(IpAddr::is_ipv4))
    }

    fn macs(&self) -> ([u8; 6], [u8; 6]) {
        let [_, a, b, c] = self.number.to_be_bytes();
        ([0x02, 0x0a, 0x00, a, b, c], [0x02, 0x0a, 0x01, a, b, c])
    }

    fn wire(&self, route: &RouteSocket) -> anyhow::Result<()> {
        let (host_mac, pod_mac) = self.macs();
        let host = VethEnd {
            name: &self.host_ifname,
            mac: host_mac,
        };
        let pod = VethEnd {
            name: "eth0",
            mac: pod_mac,
        };
        self.node
            .with_route(|node| node.create_veth(&host, self.node.bridge_index(), &pod, &self.netns))?;
        let eth0 = route.index_of("eth0")?;
        route.set_up(eth0, true)?;
        for address in &self.addresses {
            route.add_address(eth0, *address, prefix_len(*address))?;
            route.add_default_route(eth0, gateway(*address))?;
        }
        Ok(())
    }

    /// What a primary plugin would have printed for this pod (CNI spec, "Result types").
    pub fn prev_result(&self, cni_version: &str) -> Value {
        let (host_mac, pod_mac) = self.macs();
        let ips: Vec<Value> = self
            .addresses
            .iter()
            .map(|address| {
                let mut ip = json!({
                    "address": format!("{address}/{}", prefix_len(*address)),
                    "gateway": gateway(*address).to_string(),
                    "interface": 2,
                });
                if cni_version.starts_with("0.") {
                    ip["version"] = json!(if address.is_ipv4() { "4" } else { "6" });
                }
                ip
            })
            .collect();
        let routes: Vec<Value> = self
            .addresses
            .iter()
            .map(|a| json!({ "dst": if a.is_ipv4() { "0.0.0.0/0" } else { "::/0" }, "gw": gateway(*a).to_string() }))
            .collect();
        json!({
            "cniVersion": cni_version,
            "interfaces": [
                { "name": BRIDGE },
                { "name": self.host_ifname, "mac": mac_text(host_mac) },
                { "name": "eth0", "mac": mac_text(pod_mac), "sandbox": self.netns_path },
            ],
            "ips": ips,
            "routes": routes,
            "dns": {},
        })
    }

    /// Starts a process of the pod: in its netns and in a cgroup named like the kubelet's, so that a scan of `/proc`
    /// finds it. It ends with the pod.
    pub fn start_process(&self) -> anyhow::Result<u32> {
        let mut cgroup = lock(&self.cgroup);
        let cgroup = match &mut *cgroup {
            Some(cgroup) => cgroup,
            empty => empty.insert(PodCgroup::create(&self.uid, &self.container_id)?),
        };
        let process = Spawn::program("sleep", "/bin/sleep")
            .arg("infinity")
            .place(Place::from(&self.netns))
            .cgroup(cgroup)
            .start()?;
        let pid = process.pid();
        lock(&self.processes).push(process);
        Ok(pid)
    }

    /// The pod's cgroup, once a process was started.
    pub fn cgroup_path(&self) -> Option<PathBuf> {
        lock(&self.cgroup).as_ref().map(|cgroup| cgroup.path().to_owned())
    }

    /// Takes the sandbox down as a runtime does after DEL: ends its processes, removes its netns file, lets go of the
    /// netns. Whoever else still holds the netns keeps it, and its veth, alive.
    pub fn delete(mut self) -> anyhow::Result<()> {
        self.take_down()
            .with_context(|| format!("deleting pod {}", self.name))
    }

    fn take_down(&mut self) -> anyhow::Result<()> {
        lock(&self.processes).clear();
        lock(&self.cgroup).take();
        if std::mem::take(&mut self.mounted) {
            self.node.place().unmount(&self.netns_path)?;
        }
        Ok(())
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        // The node's mount namespace takes what is left with it.
        let _ = self.take_down();
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn prefix_len(address: IpAddr) -> u8 {
    if address.is_ipv4() {
        BRIDGE_V4.1
    } else {
        BRIDGE_V6.1
    }
}

fn gateway(address: IpAddr) -> IpAddr {
    if address.is_ipv4() {
        BRIDGE_V4.0.into()
    } else {
        BRIDGE_V6.0.into()
    }
}

fn mac_text(mac: [u8; 6]) -> String {
    let mut text = String::new();
    for (i, byte) in mac.iter().enumerate() {
        let _ = write!(text, "{}{byte:02x}", if i == 0 { "" } else { ":" });
    }
    text
}

/// A random UUID, from the kernel.
pub fn random_uuid() -> anyhow::Result<String> {
    let uuid = std::fs::read_to_string("/proc/sys/kernel/random/uuid").context("reading a random UUID")?;
    Ok(uuid.trim().to_owned())
}
