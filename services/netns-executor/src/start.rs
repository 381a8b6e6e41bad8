//! From a synchronous `main` to a serving process: directories, privileges and seccomp first, then threads.

use std::fs::{DirBuilder, Permissions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow};
use sluice_proto::paths::RunDir;
use sluice_proto::pb::cni::StatusRequest;
use sluice_proto::pb::cni::cni_service_client::CniServiceClient;
use sluice_proto::transport::grpc::{UdsChannel, origin};
use sluice_proto::transport::preamble;
use sluice_proto::transport::uds::{Peer, check_free};
use sluice_proto::wanted::Wanted;
use sluice_runtime::lease::{Candidate, Lease};
use tokio::runtime::{Builder, Runtime};

use crate::config::Config;
use crate::kernel::real::RealKernel;
use crate::node::Node;
use crate::pool;
use crate::retire;
use crate::sandbox::restore;
use crate::server::{Sockets, serve};
use crate::wanted;

/// Health is answered within this, or the process is not healthy.
const HEALTH_DEADLINE: Duration = Duration::from_secs(2);

/// Makes the directories of the executor's sockets and records, and gives mode and group to those that are there, as the kubelet
/// makes them for a hostPath. The broker's directory gives its group to what is made in it (set-group-ID), so that the sockets
/// need no capability later; the executor has to be a member of that group.
pub fn make_directories(config: &Config) -> anyhow::Result<()> {
    let run = &config.run;
    if !run.root().is_dir() {
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(run.root())
            .with_context(|| format!("cannot make directory {}", run.root().display()))?;
    }
    let (sandboxes, tombstones) = (run.sandboxes(), run.tombstones());
    for (directory, mode, group) in [
        (run.cni_socket().parent(), 0o700, None),
        (sandboxes.parent(), 0o700, None),
        (Some(tombstones.as_path()), 0o700, None),
        (run.opener_socket().parent(), 0o700, None),
        (
            run.executor_socket().parent(),
            0o2750,
            Some(config.peers.broker_gid),
        ),
    ] {
        let directory = directory.context("socket without a directory")?;
        make_directory(directory, mode, group)
            .with_context(|| format!("cannot prepare directory {}", directory.display()))?;
    }
    Ok(())
}

fn make_directory(directory: &Path, mode: u32, group: Option<u32>) -> std::io::Result<()> {
    if !directory.is_dir() {
        DirBuilder::new().recursive(true).mode(mode).create(directory)?;
    }
    let found = directory.metadata()?;
    let group = group.filter(|group| *group != found.gid());
    if found.uid() != nix::unistd::geteuid().as_raw() || (group.is_none() && found.mode() & 0o7777 == mode) {
        return Ok(());
    }
    if group.is_some() {
        chown(directory, None, group)?;
    }
    // After chown, which may clear the set-group-ID bit; also because of the umask.
    std::fs::set_permissions(directory, Permissions::from_mode(mode))
}

/// Makes sure that no other executor serves here: two with one table of sandboxes would undo each other's work. Waits for the
/// end of one that does if we are to stand by. Call it before the seccomp filter, under which nobody can be dialled, and serve
/// only while the lease is held.
pub fn take_lease(config: &Config) -> anyhow::Result<Lease> {
    let run = &config.run;
    let candidate = Candidate::at(&run.executor_lease())?;
    if config.stand_by {
        return Ok(candidate.wait()?);
    }
    // Who has the place is told by the socket.
    for socket in [
        run.cni_socket(),
        run.executor_socket(),
        run.descriptor_socket(),
        run.opener_socket(),
    ] {
        check_free(&socket)?;
    }
    Ok(candidate.take_now()?)
}

fn runtime() -> anyhow::Result<Runtime> {
    Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(pool::THREADS)
        .thread_keep_alive(Duration::from_hours(1))
        .thread_stack_size(512 * 1024)
        .build()
        .context("cannot build the runtime")
}

/// Serves until SIGTERM. Call it after privileges were dropped.
pub fn run(config: Config) -> anyhow::Result<()> {
    let kernel = Arc::new(
        RealKernel::new()
            .context("cannot read the own network namespace")?
            .with_host_options(config.settings.host.clone()),
    );
    runtime()?.block_on(async {
        let node = Node::new(config.settings, kernel)?;
        restore::restore(&node).await?;
        let wanted = config.run.wanted();
        let lacking = if config.no_opener { wanted::now(&node) } else { Wanted::default() };
        // Before the first plugin can call.
        lacking.write(&wanted).with_context(|| format!("cannot write {}", wanted.display()))?;
        let sockets = Sockets::bind(&config.run, config.peers)?;
        // From here on DEL reaches us.
        restore::honour_tombstones(&node);
        let stop = sluice_runtime::shutdown::signalled().context("cannot handle signals")?;
        let stop = if config.linger.is_zero() {
            stop
        } else {
            retire::after_the_broker(stop, node.hub.own_brokers(), config.linger)
        };
        tracing::info!(version = env!("CARGO_PKG_VERSION"), run_dir = %config.run.root().display(), "serving");
        if config.no_opener {
            tokio::spawn(wanted::keep(Arc::clone(&node), wanted));
        }
        serve(Arc::clone(&node), sockets, stop).await;
        retire::remove_sockets(&node, &config.run);
        Ok(())
    })
}

/// Asks the executor at `run` for its status. If that is one of another container, ours waits for its end, and is well.
pub fn healthcheck(run: &RunDir) -> anyhow::Result<()> {
    let stream = preamble::connect(&run.cni_socket(), &[], HEALTH_DEADLINE)?;
    if Peer::of(&stream)?.is_elsewhere() {
        return Ok(());
    }
    stream.set_nonblocking(true)?;
    runtime()?.block_on(async {
        let ask = async {
            let stream = tokio::net::UnixStream::from_std(stream)?;
            let channel = UdsChannel::handshake(stream).await?;
            CniServiceClient::with_origin(channel, origin())
                .status(StatusRequest {})
                .await?;
            Ok(())
        };
        tokio::time::timeout(HEALTH_DEADLINE, ask)
            .await
            .map_err(|_| anyhow!("no answer within {HEALTH_DEADLINE:?}"))?
    })
}
