//! An opener that hands over ordinary files, as [`FakeKernel`] takes them for namespaces.
//!
//! [`FakeKernel`]: sluice_netns_executor::kernel::fake::FakeKernel
#![allow(dead_code, reason = "each test binary uses its part")]

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use nix::errno::Errno;
use sluice_proto::opener::{LegacyTables, OpenerReply, OpenerRequest};
use sluice_proto::transport::seqpacket::SeqpacketConnection;
use tokio::sync::OwnedMutexGuard;
use tokio::task::JoinHandle;

#[derive(Default)]
struct State {
    candidates: BTreeMap<String, PathBuf>,
    scratch: Option<PathBuf>,
    asked: Vec<OpenerRequest>,
}

/// A connected opener.
pub(crate) struct FakeOpener {
    state: Arc<Mutex<State>>,
    diagnostics: Arc<tokio::sync::Mutex<()>>,
    serving: JoinHandle<()>,
}

impl FakeOpener {
    /// Dials the executor and answers until the connection ends; `host` stands for the host's namespace.
    pub(crate) fn connect(socket: &Path, host: Option<&Path>) -> Self {
        let state = Arc::<Mutex<State>>::default();
        let diagnostics = Arc::<tokio::sync::Mutex<()>>::default();
        let gate = Arc::clone(&diagnostics);
        let connection = SeqpacketConnection::connect(socket).unwrap();
        let (shared, host) = (Arc::clone(&state), host.map(Path::to_owned));
        let serving = tokio::spawn(async move {
            while let Ok(mut received) = connection.receive(1).await {
                let Ok(request) = OpenerRequest::decode(&received.bytes) else {
                    return;
                };
                let path = {
                    let mut state = shared.lock().unwrap();
                    state.asked.push(request.clone());
                    match &request {
                        OpenerRequest::Host => host.clone(),
                        OpenerRequest::Path(path) => Some(path.into()),
                        OpenerRequest::Scratch => state.scratch.clone(),
                        OpenerRequest::Candidate { uid, index: 0 } => {
                            state.candidates.get(uid.as_str()).cloned()
                        }
                        _ => None,
                    }
                };
                let file: Option<OwnedFd> = path.and_then(|path| File::open(path).ok()).map(Into::into);
                let file = match request {
                    OpenerRequest::Diagnostics => {
                        let _open = gate.lock().await;
                        received.descriptors.pop()
                    }
                    _ => file,
                };
                let found = file.is_some() || request == OpenerRequest::Scan;
                let reply = OpenerReply {
                    errno: if found { 0 } else { Errno::ENOENT as i32 },
                    legacy: LegacyTables::default(),
                    scanned: 0,
                };
                let descriptors: Vec<_> = file.iter().map(AsFd::as_fd).collect();
                if connection.send(&reply.encode(), &descriptors).await.is_err() {
                    return;
                }
            }
        });
        Self {
            state,
            diagnostics,
            serving,
        }
    }

    /// The scan finds this namespace for a pod.
    pub(crate) fn finds(&self, uid: &str, path: &Path) {
        let mut state = self.state.lock().unwrap();
        state.candidates.insert(uid.to_owned(), path.to_owned());
    }

    /// What stands for a new, empty namespace; until then there is none.
    pub(crate) fn makes(&self, scratch: &Path) {
        self.state.lock().unwrap().scratch = Some(scratch.to_owned());
    }

    /// Until the guard is dropped nobody is given a socket that lists connections.
    pub(crate) async fn hold_diagnostics(&self) -> OwnedMutexGuard<()> {
        Arc::clone(&self.diagnostics).lock_owned().await
    }

    /// How often something was asked.
    pub(crate) fn asked(&self, wanted: impl Fn(&OpenerRequest) -> bool) -> usize {
        let state = self.state.lock().unwrap();
        state.asked.iter().filter(|request| wanted(request)).count()
    }

    /// The executor has ended the connection.
    pub(crate) fn is_over(&self) -> bool {
        self.serving.is_finished()
    }
}

impl Drop for FakeOpener {
    fn drop(&mut self) {
        self.serving.abort();
    }
}
