//! The control socket: one line of JSON in, one out, a connection a request.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use serde::{Deserialize, Serialize};

use super::workloads::State;
use super::{Behaviour, Report};
use crate::pod::lock;
use crate::wait::poll_until;

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Request {
    Behave(Behaviour),
    Report { messages: bool },
    ForgetMessages,
}

/// Serves requests on a thread of its own.
pub(super) fn serve(path: &Path, state: Arc<State>) -> std::io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    std::thread::Builder::new()
        .name("control".to_owned())
        .spawn(move || {
            for stream in listener.incoming().flatten() {
                let _ = stream.set_read_timeout(Some(Duration::from_secs(1)));
                if let Err(error) = answer(&stream, &state) {
                    tracing::debug!(%error, "control request");
                }
            }
        })?;
    Ok(())
}

fn answer(mut stream: &UnixStream, state: &State) -> anyhow::Result<()> {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    let report = match serde_json::from_str(&line)? {
        Request::Behave(behaviour) => {
            *lock(&state.behaviour) = behaviour;
            state.report(false)
        }
        Request::Report { messages } => state.report(messages),
        Request::ForgetMessages => {
            state.forget_messages();
            state.report(false)
        }
    };
    writeln!(stream, "{}", serde_json::to_string(&report)?)?;
    Ok(())
}

/// Talks to a stand-in through its control socket.
#[derive(Debug, Clone)]
pub struct Control(PathBuf);

impl Control {
    /// The stand-in whose control socket is at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    fn ask(&self, request: &Request) -> anyhow::Result<Report> {
        let mut stream =
            UnixStream::connect(&self.0).with_context(|| format!("connecting to {}", self.0.display()))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        writeln!(stream, "{}", serde_json::to_string(request)?)?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line)?;
        serde_json::from_str(&line).context("report of the stand-in")
    }

    /// Replaces the whole behaviour.
    pub fn behave(&self, behaviour: Behaviour) -> anyhow::Result<()> {
        self.ask(&Request::Behave(behaviour)).map(drop)
    }

    /// The report, with all messages.
    pub fn report(&self) -> anyhow::Result<Report> {
        self.ask(&Request::Report { messages: true })
    }

    /// The report without the messages: quicker.
    pub fn counts(&self) -> anyhow::Result<Report> {
        self.ask(&Request::Report { messages: false })
    }

    /// Empties the list of messages.
    pub fn forget_messages(&self) -> anyhow::Result<()> {
        self.ask(&Request::ForgetMessages).map(drop)
    }

    /// Waits until the report (without messages) satisfies `condition`.
    pub fn wait(
        &self,
        what: &str,
        within: Duration,
        condition: impl Fn(&Report) -> bool,
    ) -> anyhow::Result<Report> {
        Ok(poll_until(what, within, || {
            self.counts().ok().filter(&condition)
        })?)
    }

    /// Waits until a ZDS connection is up and its snapshot was taken.
    pub fn wait_ready(&self, within: Duration) -> anyhow::Result<Report> {
        self.wait("stand-in is ready", within, |report| report.ready)
    }

    /// Waits until the stand-in holds the pod with this UID.
    pub fn wait_held(&self, uid: &str, within: Duration) -> anyhow::Result<Report> {
        self.wait(&format!("stand-in holds {uid}"), within, |report| {
            report.workloads.contains_key(uid)
        })
    }
}
