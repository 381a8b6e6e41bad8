//! Each question: ask, print, judge.

use std::io::Write;

use serde::Serialize;
use sluice_proto::paths::RunDir;
use sluice_proto::pb::workload::pod_event::Event;

use crate::bug_report;
use crate::cli::{Cli, Output, PodArgument, Question, command};
use crate::client::{AskError, Broker, next};
use crate::kubectl::{self, Kubectl};
use crate::render;
use crate::view::{NodeView, PodDetails, PodView};
use crate::{BROKEN, FAILED, HEALTHY};

/// Answers the question on `out` and gives the exit status.
pub(crate) fn execute(cli: &Cli, out: &mut impl Write) -> Result<u8, AskError> {
    let answered_here = matches!(cli.question, Question::Completion { .. });
    if !answered_here && is_afar(cli) {
        return from_afar(cli, out);
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
        .map_err(AskError::Runtime)?;
    runtime.block_on(async {
        match &cli.question {
            Question::Completion { shell } => {
                clap_complete::generate(*shell, &mut command("sluicectl"), "sluicectl", out);
                Ok(HEALTHY)
            }
            Question::Status { pod: None } => status(cli, out).await,
            Question::Status { pod: Some(pod) } => {
                let namespace = pod.namespace.as_deref().unwrap_or("default");
                let details = describe(cli, namespace, pod).await?;
                print(cli, out, &details, || render::pod(&details, render::now_ms()))?;
                Ok(judge(details.is_broken()))
            }
            Question::Explain { pod, namespace } => {
                let namespace = pod.namespace.as_ref().unwrap_or(namespace);
                let details = describe(cli, namespace, pod).await?;
                print(cli, out, &details, || render::explanation(&details))?;
                Ok(judge(details.is_broken()))
            }
            Question::BugReport(options) => {
                bug_report::on_node(cli, options, out).await?;
                Ok(HEALTHY)
            }
            Question::Watch => watch(cli, out).await,
            Question::Preflight => preflight(cli, out).await,
        }
    })
}

/// A node was named; or kubectl calls us where there is no agent.
fn is_afar(cli: &Cli) -> bool {
    cli.node.is_some() || (cli.is_plugin && !RunDir::new(&cli.run_dir).workload_socket().exists())
}

/// Comes back only with an error, unless there is a report to write.
fn from_afar(cli: &Cli, out: &mut impl Write) -> Result<u8, AskError> {
    let kubectl = Kubectl::new(cli);
    let node = match &cli.node {
        Some(node) => node.clone(),
        None => kubectl::node_of_question(&kubectl, &cli.question)?,
    };
    let agent = kubectl.agent(&node)?;
    if let Question::BugReport(options) = &cli.question {
        bug_report::of_node(&kubectl, &agent, options, out)?;
        return Ok(HEALTHY);
    }
    let arguments = kubectl::arguments(cli);
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    Err(kubectl.become_exec(&agent, &arguments).into())
}

fn judge(broken: bool) -> u8 {
    if broken { BROKEN } else { HEALTHY }
}

async fn status(cli: &Cli, out: &mut impl Write) -> Result<u8, AskError> {
    let mut broker = Broker::connect(&cli.run_dir).await?;
    let view = NodeView {
        node: broker.node().await?,
        pods: broker.pods().await?.into_iter().map(PodView::from).collect(),
    };
    print(cli, out, &view, || render::node(&view, render::now_ms()))?;
    Ok(judge(view.is_broken()))
}

async fn describe(cli: &Cli, namespace: &str, pod: &PodArgument) -> Result<PodDetails, AskError> {
    let mut broker = Broker::connect(&cli.run_dir).await?;
    Ok(broker.describe(namespace, &pod.name).await?.into())
}

async fn preflight(cli: &Cli, out: &mut impl Write) -> Result<u8, AskError> {
    let mut broker = Broker::connect(&cli.run_dir).await?;
    let features = broker.node().await?.preflight;
    print(cli, out, &features, || render::preflight(&features))?;
    let missing = features
        .iter()
        .any(|feature| feature.required && !feature.available);
    // Nothing was proved yet: neither well nor broken.
    Ok(if features.is_empty() {
        FAILED
    } else {
        judge(missing)
    })
}

/// Ends only with the connection, and then by an error.
async fn watch(cli: &Cli, out: &mut impl Write) -> Result<u8, AskError> {
    let mut broker = Broker::connect(&cli.run_dir).await?;
    let mut events = broker.subscribe().await?;
    loop {
        let line = match next(&mut events).await? {
            Event::Present(pod) => Line::pod("present", pod.into()),
            Event::Changed(pod) => Line::pod("changed", pod.into()),
            Event::Gone(pod) => Line {
                event: "gone",
                pod: format!("{}/{}", pod.namespace, pod.name),
                details: None,
            },
            Event::SnapshotDone(_) => continue,
        };
        let text = match cli.output {
            Output::Json => to_json(&line, false)?,
            Output::Table => render::event(line.event, &line.pod, line.details.as_ref(), render::now_ms()),
        };
        writeln!(out, "{text}")
            .and_then(|()| out.flush())
            .map_err(AskError::Output)?;
    }
}

/// One event of a watch.
#[derive(Serialize)]
struct Line {
    event: &'static str,
    pod: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    details: Option<PodView>,
}

impl Line {
    fn pod(event: &'static str, pod: PodView) -> Self {
        Self {
            event,
            pod: pod.full_name(),
            details: Some(pod),
        }
    }
}

fn to_json(value: &impl Serialize, pretty: bool) -> Result<String, AskError> {
    if pretty {
        serde_json::to_string_pretty(value)
    } else {
        serde_json::to_string(value)
    }
    .map_err(|error| AskError::Output(error.into()))
}

fn print(
    cli: &Cli,
    out: &mut impl Write,
    value: &impl Serialize,
    table: impl FnOnce() -> String,
) -> Result<(), AskError> {
    let text = match cli.output {
        Output::Table => table(),
        Output::Json => to_json(value, true)?,
    };
    writeln!(out, "{}", text.trim_end())
        .and_then(|()| out.flush())
        .map_err(AskError::Output)
}
