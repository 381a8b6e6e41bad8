//! netns-opener: hands the executor sockets made in network namespaces that it may not enter itself.

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Context;
use sluice_netns_executor::opener::arguments::{Arguments, HELP, Settings};
use sluice_netns_executor::opener::{Keyhole, Opener, Options, cage, health, log};
use sluice_proto::paths::RunDir;
use sluice_runtime::lease::Candidate;
use sluice_runtime::{init, limits};

fn main() -> ExitCode {
    let settings = match Arguments::read() {
        Ok(Arguments::Serve(settings)) => settings,
        Ok(Arguments::Healthcheck) => return ExitCode::from(u8::from(!health::caged_opener_runs())),
        Ok(Arguments::Help) => return print(HELP),
        Ok(Arguments::Version) => return print(concat!("netns-opener ", env!("CARGO_PKG_VERSION"), "\n")),
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "netns-opener: {error}\n\n{HELP}");
            return ExitCode::from(2);
        }
    };
    log::init();
    init::run(|| match serve(settings) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "netns-opener stops");
            ExitCode::FAILURE
        }
    })
}

fn print(text: &str) -> ExitCode {
    let printed = std::io::stdout().write_all(text.as_bytes());
    ExitCode::from(u8::from(printed.is_err()))
}

fn serve(settings: Settings) -> anyhow::Result<()> {
    limits::use_one_heap();
    let open_files = limits::raise_open_files().context("cannot raise the limit of open files")?;
    let keyhole = Keyhole::start(&settings.host_proc)?;
    let run = RunDir::new(settings.run_dir);
    let candidate = Candidate::at(&run.opener_lease())?;
    let options = Options {
        socket: run.opener_socket(),
        host_proc: settings.host_proc.clone(),
        host_netns: settings.host_netns,
        netns_directories: settings.netns_directories.clone(),
        stand_by: settings.stand_by,
    };
    let mut opener = Opener::new(options, keyhole)?;
    cage::confine_opener(&settings.host_proc, &settings.netns_directories)
        .context("cannot confine the opener")?;
    tracing::info!(open_files, "netns-opener is ready and caged");
    Ok(opener.run(candidate)?)
}
