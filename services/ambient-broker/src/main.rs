//! Start-up order: settings, user, limits, privileges, seccomp; only then a thread, a socket or a request.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use clap::Parser;
use sluice_ambient_broker::config::Args;
use sluice_ambient_broker::reconcile::Settings;
use sluice_ambient_broker::service::{Config, run};
use sluice_ambient_broker::source::{ManifestDirectory, WatchMode};
use sluice_ambient_broker::status::NoStatus;
use sluice_ambient_broker::zds;
use sluice_proto::transport::uds::PeerPolicy;
use sluice_runtime::{limits, privileges, seccomp, shutdown, telemetry};

const SECCOMP: &str = include_str!("../seccomp/ambient-broker.json");

fn main() -> ExitCode {
    telemetry::init("ambient-broker");
    match start(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(
                error = telemetry::chain(error.as_ref()),
                "ambient-broker cannot run"
            );
            ExitCode::FAILURE
        }
    }
}

fn start(args: &Args) -> anyhow::Result<()> {
    args.check_user()?;
    let config = config(args)?;
    limits::use_one_heap();
    let open_files = limits::raise_open_files().context("cannot raise the open-files limit")?;
    privileges::drop_to(&[])?;
    seccomp::install(SECCOMP)?;
    tracing::info!(open_files, selection = config.selection.hash(), "starting");
    let mode = if args.poll_manifests {
        WatchMode::Poll
    } else {
        WatchMode::Auto
    };
    let source = Arc::new(ManifestDirectory::new(&args.manifests, mode));
    // One thread: every step is short, and a hand-over between threads costs more than the step.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async { Ok(run(config, source, Arc::new(NoStatus), shutdown::signalled()?).await?) })
}

fn config(args: &Args) -> anyhow::Result<Config> {
    let socket = args.zds_socket.clone().unwrap_or_else(|| args.run().zds_socket());
    Ok(Config {
        run: args.run(),
        selection: args.selection()?,
        settings: Settings {
            drain: args.drain(),
            seed: std::process::id().into(),
            ..Settings::default()
        },
        zds: zds::Options {
            mode: args.zds_mode,
            group: args.zds_gid,
            window: args.zds_window.into(),
            ..zds::Options::new(socket, args.zds_uids.clone())
        },
        listen: args.listen,
        istio_cni: args.istio_cni.then_some(args.istio_cni_mode),
        workload_peers: PeerPolicy::uids(args.workload_uids.clone()),
        require_ztunnel: args.require_ztunnel,
    })
}
