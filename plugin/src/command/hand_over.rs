//! What the executor lacks on a node without an opener is handed over in passing: nobody else may enter namespaces. None
//! of it is the pod's business, so none of it fails its ADD.

use std::os::fd::OwnedFd;
use std::time::Duration;

use sluice_proto::id::Attachment;
use sluice_proto::pb::cni::HandOverRequest;
use sluice_proto::wanted::Wanted;

use crate::config::Settings;
use crate::deadline::Deadline;
use crate::error::chain;
use crate::executor;
use crate::log::{Level, line};
use crate::netns::{NetnsError, PodNetns, open_own};

/// All sandboxes together may take this long, since the runtime waits.
const AT_MOST: Duration = Duration::from_secs(2);
/// The executor was there a moment ago.
const CONNECT: Duration = Duration::from_millis(100);

/// What is lacking. A file that cannot be read lacks nothing: it is the executor's to mend.
pub(super) fn wanted(settings: &Settings) -> Wanted {
    Wanted::read(&settings.run_dir.wanted()).unwrap_or_else(|error| {
        let error = error.to_string();
        line(
            Level::Warn,
            "cannot tell what the executor lacks",
            &[("error", &error)],
        );
        Wanted::default()
    })
}

/// The host's namespace, which the process must still be in.
pub(super) fn host(wanted: &Wanted, settings: &Settings, deadline: Deadline) {
    if wanted.host {
        report(
            "the host's network namespace",
            hand_over(open_own(), None, settings, deadline),
        );
    }
}

/// Sandboxes of an earlier life of the executor, `own` excepted.
pub(super) fn sandboxes(wanted: &Wanted, own: &Attachment, settings: &Settings, deadline: Deadline) {
    let begun = std::time::Instant::now();
    for sandbox in wanted
        .sandboxes
        .iter()
        .filter(|sandbox| sandbox.attachment != *own)
    {
        if begun.elapsed() > AT_MOST {
            return;
        }
        let sockets = PodNetns::open_elsewhere(&sandbox.netns_path);
        let done = hand_over(sockets, Some(&sandbox.attachment), settings, deadline);
        report(&sandbox.attachment.to_string(), done);
    }
}

fn hand_over(
    sockets: Result<Vec<OwnedFd>, NetnsError>,
    of: Option<&Attachment>,
    settings: &Settings,
    deadline: Deadline,
) -> Result<(), String> {
    let sockets = sockets.map_err(|error| chain(&error))?;
    let message = HandOverRequest {
        attachment: of.map(Into::into),
    };
    let path = settings.run_dir.cni_socket();
    let answer = executor::call(&path, sockets, CONNECT, deadline, |mut client| async move {
        client.hand_over(executor::request(message, deadline)).await
    });
    match answer.map_err(|error| chain(&error))?.failed {
        None => Ok(()),
        Some(failure) => Err(failure.cause),
    }
}

fn report(what: &str, done: Result<(), String>) {
    match done {
        Ok(()) => line(Level::Info, "handed over", &[("what", what)]),
        Err(error) => line(
            Level::Warn,
            "not handed over",
            &[("what", what), ("error", &error)],
        ),
    }
}
