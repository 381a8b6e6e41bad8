//! Who holds on to a netns: descriptors as `/proc` shows them, and the interface that lives as long as the netns does.

use std::time::Duration;

use sluice_testkit::process::Process;
use sluice_testkit::process::status::ProcStatus;
use sluice_testkit::wait::poll_until;

use crate::mesh::Mesh;

/// How long anybody may hold a netns that has no pod any more.
pub const LET_GO: Duration = Duration::from_secs(2);

/// Our running processes, the stand-in included.
pub fn processes(mesh: &Mesh) -> Vec<&Process> {
    let all = [mesh.opener.as_ref(), Some(&mesh.executor), Some(&mesh.broker), mesh.proxy.as_ref()];
    all.into_iter().flatten().filter(|process| process.is_running()).collect()
}

/// Names of our processes that hold a descriptor of the netns with this inode number, or have a thread in it.
pub fn holders(mesh: &Mesh, inode: u64) -> anyhow::Result<Vec<String>> {
    let link = format!("net:[{inode}]");
    let mut found = Vec::new();
    for process in processes(mesh) {
        let status = ProcStatus::read(process.pid())?;
        let held = status.descriptors()?.into_values().filter(|target| target.as_os_str() == link.as_str()).count();
        let inside = status.thread_netns()?.into_values().filter(|netns| *netns == inode).count();
        if held + inside > 0 {
            found.push(format!("{}: {held} descriptors, {inside} threads", process.name()));
        }
    }
    Ok(found)
}

/// Waits until no process of ours holds the netns and the host's end of its veth is gone, which also proves that no
/// netlink socket keeps it: `/proc` does not show where a socket lives.
pub fn wait_let_go(mesh: &Mesh, inode: u64, host_ifname: &str, within: Duration) -> anyhow::Result<()> {
    let mut last = String::new();
    let done = poll_until("everybody has let go", within, || {
        let interface = mesh.node().interfaces().ok()?.iter().any(|name| name == host_ifname);
        let held = holders(mesh, inode).ok()?;
        last = format!("interface there: {interface}, held by {held:?}");
        (!interface && held.is_empty()).then_some(())
    });
    done.map_err(|late| anyhow::anyhow!("{late}: {last}"))
}
