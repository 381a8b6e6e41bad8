//! The demo: the whole product at work on one simulated node. It runs nothing but Sluice's own programs, and what it
//! tells comes from the kernel, from traffic, or from counters of the stand-in proxy.

mod change;
mod failure;
pub mod kernel;
mod narrator;
mod refusal;
mod stage;
mod start;
mod traffic;

use anyhow::Context;
use sluice_testkit::netns::Place;
use sluice_testkit::process::{self, binary};

use self::narrator::{Narrator, say, show};
use self::stage::Stage;

/// Command line of `sluice-demo`.
#[derive(Debug, Clone, clap::Parser)]
#[command(
    about = "Shows Sluice at work in network namespaces of its own; needs root, changes nothing on this machine"
)]
pub struct Options {
    /// Leave the node running at the end, until Ctrl-C, and print how to look around.
    #[arg(long)]
    pub keep: bool,
}

/// Plays everything; true if everything held.
pub fn run(options: &Options) -> anyhow::Result<bool> {
    anyhow::ensure!(
        nix::unistd::geteuid().is_root(),
        "the demo makes network namespaces: run it as root"
    );
    let mut narrator = Narrator::default();
    say(
        "Sluice on a simulated node. The host, each pod and each process have network namespaces of their own; nothing\n\
         on this machine changes. ztunnel's place is taken by a stand-in that relays without any security.",
    );
    let Some(mesh) = start::node(&mut narrator) else {
        narrator.summary();
        return Ok(false);
    };
    let Some(stage) = start::pods(&mut narrator, mesh) else {
        narrator.summary();
        return Ok(false);
    };
    for act in [
        traffic::requests,
        traffic::names,
        traffic::probes,
        change::label,
        failure::kills,
        failure::damage,
        refusal::forged,
        refusal::agent_down,
        refusal::proxy_away,
        refusal::leaving,
        operator,
    ] {
        act(&mut narrator, &stage);
    }
    narrator.summary();
    if options.keep {
        keep(&stage)?;
    }
    Ok(narrator.all_held())
}

/// What `sluicectl` shows at the end.
fn operator(narrator: &mut Narrator, stage: &Stage) {
    narrator.step(
        "What an operator sees",
        "sluicectl asks the broker over its socket; exit status 0 says healthy.",
        |step| {
            let program = binary("sluicectl")?;
            let run_dir = stage.mesh.run.root().to_string_lossy();
            let arguments = ["--run-dir", &run_dir, "status"];
            let output = process::output(&Place::default(), &program.to_string_lossy(), &arguments, b"")?;
            let text = String::from_utf8_lossy(&output.stdout);
            step.saw(
                output.status.success(),
                format!("sluicectl status: {}", output.status),
            );
            show(&text);
            step.sums_up(output.status.to_string());
            Ok(())
        },
    );
}

/// Leaves everything running until Ctrl-C.
fn keep(stage: &Stage) -> anyhow::Result<()> {
    let program = binary("sluicectl")?;
    let run_dir = stage.mesh.run.root().display();
    let sluicectl = format!("{} --run-dir {run_dir}", program.display());
    say(&format!(
        "\nThe node keeps running. From another shell, as root:\n\n  {sluicectl} status\n  {sluicectl} status --pod default/client\n  \
         {sluicectl} explain plain\n  {sluicectl} watch\n  {sluicectl} preflight\n\nManifests to edit: {}\nLogs:              \
         {}/*.log\nInside a pod:      nsenter --net=/proc/{}/fd/{} ... (pod client)\n\nCtrl-C ends it.",
        stage.mesh.manifests.path().display(),
        stage.mesh.node().dir().display(),
        std::process::id(),
        std::os::fd::AsRawFd::as_raw_fd(&std::os::fd::AsFd::as_fd(stage.client.netns())),
    ));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime
        .block_on(tokio::signal::ctrl_c())
        .context("waiting for Ctrl-C")
}
