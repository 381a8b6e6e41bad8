//! The ZDS client: one blocking thread that connects, says hello, and answers every message in order.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use prost::Message;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType};
use sluice_proto::pb::zds::workload_request::Payload;
use sluice_proto::pb::zds::{Ack, Version, WorkloadRequest, WorkloadResponse, ZdsHello, workload_response};
use sluice_proto::transport::descriptors;

use super::behaviour::Keys;
use super::report::ZdsMessage;
use super::workloads::State;
use crate::pod::lock;

/// ztunnel's receive buffer.
const MAX_MESSAGE: usize = 1024;

/// The running client.
#[derive(Debug)]
pub(super) struct Client {
    stopping: Arc<AtomicBool>,
    current: Arc<Mutex<Option<OwnedFd>>>,
}

impl Client {
    pub(super) fn start(state: Arc<State>) -> std::io::Result<Self> {
        let (stopping, current) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let client = Self {
            stopping: stopping.clone(),
            current: Arc::clone(&current),
        };
        std::thread::Builder::new()
            .name("zds".to_owned())
            .spawn(move || run(&state, &stopping, &current))?;
        Ok(client)
    }

    /// Ends the connection and makes no other.
    pub(super) fn close(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        if let Some(socket) = &*lock(&self.current) {
            let _ = rustix::net::shutdown(socket, Shutdown::Both);
        }
    }
}

const FIRST_PAUSE: Duration = Duration::from_millis(10);

fn run(state: &State, stopping: &AtomicBool, current: &Mutex<Option<OwnedFd>>) {
    let longest = Duration::from_millis(state.options.max_backoff_ms).max(FIRST_PAUSE);
    let mut pause = FIRST_PAUSE;
    while !stopping.load(Ordering::Relaxed) {
        if !lock(&state.behaviour).stay_away
            && let Ok(socket) = connect(state)
        {
            *lock(current) = socket.try_clone().ok();
            let mut connection = Connection {
                state,
                number: state.begin(),
                socket,
            };
            connection.serve();
            state.disconnected();
            *lock(current) = None;
            pause = FIRST_PAUSE;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(longest);
    }
}

fn connect(state: &State) -> std::io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(&state.options.zds)?)?;
    let hello = ZdsHello {
        version: Version::V1.into(),
    }
    .encode_to_vec();
    descriptors::send(&socket, &hello, &[]).map_err(std::io::Error::other)?;
    Ok(socket)
}

struct Connection<'a> {
    state: &'a State,
    number: u32,
    socket: OwnedFd,
}

/// Whether the connection goes on.
type GoOn = bool;

impl Connection<'_> {
    fn serve(&mut self) {
        loop {
            match descriptors::receive(&self.socket, MAX_MESSAGE, 1) {
                Ok(received) if received.bytes.is_empty() => return,
                Ok(received) => {
                    if !self.message(&received.bytes, received.descriptors) {
                        return;
                    }
                }
                Err(descriptors::TransportError::Call { .. } | descriptors::TransportError::Closed) => return,
                Err(error) => {
                    self.unreadable(&error.to_string());
                    return;
                }
            }
        }
    }

    fn message(&mut self, bytes: &[u8], mut received: Vec<OwnedFd>) -> GoOn {
        let descriptor = received.pop();
        let payload = match WorkloadRequest::decode(bytes) {
            Ok(WorkloadRequest {
                payload: Some(payload),
            }) => payload,
            Ok(_) => return self.unreadable("no payload"),
            Err(error) => return self.unreadable(&error.to_string()),
        };
        let mut record = describe(&payload, self.number);
        let is_add = matches!(payload, Payload::Add(_));
        if is_add != descriptor.is_some() {
            return self.unreadable(&format!("{} with {} descriptors", record.kind, u8::from(!is_add)));
        }
        let inode = descriptor
            .as_ref()
            .and_then(|fd| nix::sys::stat::fstat(fd).ok())
            .map(|stat| stat.st_ino);
        record.netns_inode = inode;
        let keys = Keys::new(&record.kind, &record.uid, record.pod.as_deref());
        let behaviour = lock(&self.state.behaviour).clone();
        if keys.any(&behaviour.close) || !self.hold_answer(&keys) {
            "none".clone_into(&mut record.answer);
            self.state.record(record);
            return false;
        }
        if let Some(delay) = keys.find(&behaviour.delay_ms) {
            std::thread::sleep(Duration::from_millis(*delay));
        }
        let told = lock(&self.state.behaviour).clone();
        let refused = keys.find(&told.nack).cloned();
        let outcome = match (refused, payload, descriptor) {
            (Some(text), _, None) => Err(text),
            (Some(text), _, Some(netns)) => {
                self.state.hold_refused(&record.uid, netns);
                Err(text)
            }
            (None, Payload::Add(add), Some(netns)) => match add.workload_info {
                Some(info) => self.state.add(&add.uid, info, netns),
                None => Err("failure to process message : no workload_info".to_owned()),
            },
            (None, Payload::Keep(keep), _) => self.state.keep(&keep.uid),
            (None, Payload::SnapshotSent(_), _) => self.state.snapshot_sent(),
            (None, Payload::Del(del), _) => {
                self.state.delete(&del.uid);
                Ok(())
            }
            (None, Payload::Add(_), None) => Err("failure to read message : no descriptor".to_owned()),
        };
        record.answer = match &outcome {
            _ if keys.any(&told.garbage) => "garbage".to_owned(),
            _ if keys.any(&told.twice) => "twice".to_owned(),
            Ok(()) => "ack".to_owned(),
            Err(text) => format!("nack: {text}"),
        };
        let answer = encode(outcome);
        let how = record.answer.clone();
        // First, so that whoever has the answer finds it in the report.
        self.state.record(record);
        match how.as_str() {
            "garbage" => self.send(&[0xff; 8]),
            "twice" => self.send(&answer) && self.send(&answer),
            _ => self.send(&answer),
        }
    }

    /// Waits while this message is one to be silent about; false if the peer closed meanwhile.
    fn hold_answer(&self, keys: &Keys) -> GoOn {
        while keys.any(&lock(&self.state.behaviour).silent) {
            let mut polled = [PollFd::new(&self.socket, PollFlags::empty())];
            let tick = Timespec {
                tv_sec: 0,
                tv_nsec: 5_000_000,
            };
            if !matches!(rustix::event::poll(&mut polled, Some(&tick)), Ok(0)) {
                return false;
            }
        }
        true
    }

    fn unreadable(&mut self, why: &str) -> GoOn {
        let text = format!("failure to read message : {why}");
        self.state.record(ZdsMessage {
            connection: self.number,
            at_us: 0,
            kind: "unreadable".to_owned(),
            uid: String::new(),
            pod: None,
            service_account: None,
            netns_inode: None,
            answer: format!("nack: {text}"),
        });
        self.send(&encode(Err(text)));
        false
    }

    fn send(&self, bytes: &[u8]) -> GoOn {
        descriptors::send(self.socket.as_fd(), bytes, &[]).is_ok()
    }
}

fn encode(outcome: Result<(), String>) -> Vec<u8> {
    let mut error = outcome.err().unwrap_or_default();
    error.truncate(error.floor_char_boundary(900));
    WorkloadResponse {
        payload: Some(workload_response::Payload::Ack(Ack { error })),
    }
    .encode_to_vec()
}

fn describe(payload: &Payload, connection: u32) -> ZdsMessage {
    let (kind, uid, info) = match payload {
        Payload::Add(add) => ("add", add.uid.as_str(), add.workload_info.as_ref()),
        Payload::Keep(keep) => ("keep", keep.uid.as_str(), None),
        Payload::Del(del) => ("del", del.uid.as_str(), None),
        Payload::SnapshotSent(_) => ("snapshot_sent", "", None),
    };
    ZdsMessage {
        connection,
        at_us: 0,
        kind: kind.to_owned(),
        uid: uid.to_owned(),
        pod: info.map(|info| format!("{}/{}", info.namespace, info.name)),
        service_account: info.map(|info| info.service_account.clone()),
        netns_inode: None,
        answer: String::new(),
    }
}
