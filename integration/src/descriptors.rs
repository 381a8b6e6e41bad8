//! Who holds on to a netns: descriptors as `/proc` shows them, and the interface that lives as long as the netns does.

use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use sluice_testkit::process::Process;
use sluice_testkit::process::status::ProcStatus;
use sluice_testkit::wait::poll_until;

use crate::kernel_state::family;
use crate::mesh::Mesh;

/// How long anybody may hold a netns that has no pod any more.
pub const LET_GO: Duration = Duration::from_secs(2);

/// Our running processes, the stand-in included.
pub fn processes(mesh: &Mesh) -> Vec<&Process> {
    let all = [
        mesh.opener.as_ref(),
        Some(&mesh.executor),
        Some(&mesh.broker),
        mesh.proxy.as_ref(),
    ];
    all.into_iter()
        .flatten()
        .filter(|process| process.is_running())
        .collect()
}

/// Names of our processes (and of their children) that hold a descriptor of the netns with this inode number, or have
/// a thread in it.
pub fn holders(mesh: &Mesh, inode: u64) -> anyhow::Result<Vec<String>> {
    let mut found = Vec::new();
    for (name, pid) in all_processes(mesh)? {
        let status = ProcStatus::read(pid)?;
        let held = status
            .descriptors()?
            .into_keys()
            .filter(|fd| is_netns(pid, *fd, inode))
            .count();
        let inside = status
            .thread_netns()?
            .into_values()
            .filter(|netns| *netns == inode)
            .count();
        if held + inside > 0 {
            found.push(format!("{name}: {held} descriptors, {inside} threads"));
        }
    }
    Ok(found)
}

/// By what is open, not by what the link says: that shows the path a netns was opened at.
fn is_netns(pid: u32, fd: u32, inode: u64) -> bool {
    let of = |path: &str| std::fs::metadata(path).map(|meta| (meta.dev(), meta.ino()));
    // nsfs has one device number for all namespaces.
    match (of("/proc/self/ns/net"), of(&format!("/proc/{pid}/fd/{fd}"))) {
        (Ok((nsfs, _)), Ok(open)) => open == (nsfs, inode),
        _ => false,
    }
}

/// Name and pid of each process of ours, and of their children, which the opener has.
pub fn all_processes(mesh: &Mesh) -> anyhow::Result<Vec<(String, u32)>> {
    let mut all = Vec::new();
    for process in processes(mesh) {
        let pids = family(process.pid())?.into_iter();
        all.extend(pids.map(|pid| (process.name().to_owned(), pid)));
    }
    Ok(all)
}

/// Waits until no process of ours holds the netns and the host's end of its veth is gone, which also proves that no
/// netlink socket keeps it: `/proc` does not show where a socket lives.
pub fn wait_let_go(mesh: &Mesh, inode: u64, host_ifname: &str, within: Duration) -> anyhow::Result<()> {
    let mut last = String::new();
    let done = poll_until("everybody has let go", within, || {
        let interface = mesh
            .node()
            .interfaces()
            .ok()?
            .iter()
            .any(|name| name == host_ifname);
        let held = holders(mesh, inode).ok()?;
        last = format!("interface there: {interface}, held by {held:?}");
        (!interface && held.is_empty()).then_some(())
    });
    done.map_err(|late| anyhow::anyhow!("{late}: {last}"))
}
