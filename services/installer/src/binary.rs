//! The plugin that came with us: asked once, before anything is installed, whether it runs on this machine at all.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde::Deserialize;

/// The plugin has this long to answer VERSION.
const ANSWER: Duration = Duration::from_secs(10);

/// The plugin is not one that could be installed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProbeError {
    #[error("cannot run {}: is it built for this architecture?", path.display())]
    Run {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{} did not answer VERSION within {ANSWER:?}", path.display())]
    Deadline { path: PathBuf },
    #[error("{} answered VERSION with something else: {answer:?}", path.display())]
    Answer { path: PathBuf, answer: String },
}

/// Executes the plugin with `CNI_COMMAND=VERSION` (CNI spec section 2) and gives the versions that it speaks.
pub(crate) fn probe(path: &Path) -> Result<Vec<String>, ProbeError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Answer {
        supported_versions: Vec<String>,
    }
    let run = |source| ProbeError::Run {
        path: path.to_owned(),
        source,
    };
    let mut child = start(path).map_err(run)?;
    let status = wait(&mut child).map_err(run)?;
    let Some(status) = status else {
        let _ = child.kill();
        let _ = child.wait();
        return Err(ProbeError::Deadline {
            path: path.to_owned(),
        });
    };
    let mut answer = String::new();
    if let Some(stdout) = child.stdout.take() {
        let _ = stdout.take(4096).read_to_string(&mut answer);
    }
    match serde_json::from_str::<Answer>(&answer) {
        Ok(found) if status.success() && !found.supported_versions.is_empty() => Ok(found.supported_versions),
        _ => Err(ProbeError::Answer {
            path: path.to_owned(),
            answer,
        }),
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "before the seccomp filter that forbids it, and only what the image brought"
)]
fn start(path: &Path) -> std::io::Result<Child> {
    Command::new(path)
        .env_clear()
        .env("CNI_COMMAND", "VERSION")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
}

/// `None`: it still runs. The answer is far shorter than a pipe's room, so nobody has to read it meanwhile.
fn wait(child: &mut Child) -> std::io::Result<Option<std::process::ExitStatus>> {
    let until = Instant::now() + ANSWER;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= until {
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
