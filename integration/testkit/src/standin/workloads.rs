//! The pods the stand-in holds, and the changes ZDS makes to them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, RwLock};
use std::time::Instant;

use sluice_proto::pb::zds::WorkloadInfo;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::relay::Relay;
use super::report::{Counters, MESSAGES_KEPT, Report, WorkloadReport, ZdsMessage};
use super::sockets::Listening;
use super::{Behaviour, Options};
use crate::netns::Netns;
use crate::pod::lock;

/// Addresses of the pods held, with how many pods claim each.
#[derive(Debug, Clone, Default)]
pub(super) struct AddressBook(Arc<RwLock<HashMap<IpAddr, u32>>>);

impl AddressBook {
    pub(super) fn contains(&self, address: IpAddr) -> bool {
        self.0.read().is_ok_and(|book| book.contains_key(&address))
    }

    fn change(&self, addresses: &[IpAddr], add: bool) {
        let Ok(mut book) = self.0.write() else { return };
        for address in addresses {
            let count = book.entry(*address).or_default();
            *count = if add { *count + 1 } else { count.saturating_sub(1) };
        }
        book.retain(|_, count| *count > 0);
    }
}

/// A pod that is relayed for. Dropping it ends its connections at once.
#[derive(Debug)]
struct Workload {
    info: WorkloadInfo,
    netns: Netns,
    addresses: Vec<IpAddr>,
    counters: Arc<Counters>,
    task: Option<JoinHandle<std::io::Result<()>>>,
    book: AddressBook,
}

impl Drop for Workload {
    fn drop(&mut self) {
        self.book.change(&self.addresses, false);
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// Everything the parts of the stand-in share.
#[derive(Debug)]
pub(super) struct State {
    pub(super) options: Options,
    pub(super) behaviour: Mutex<Behaviour>,
    handle: Handle,
    started: Instant,
    book: AddressBook,
    closing: watch::Sender<bool>,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    workloads: BTreeMap<String, Workload>,
    pending: BTreeMap<String, Netns>,
    /// UIDs of the snapshot that is being received; `None` once it is complete.
    snapshot: Option<BTreeSet<String>>,
    ready: bool,
    connections: u32,
    messages: Vec<ZdsMessage>,
}

impl State {
    pub(super) fn new(options: Options, handle: Handle) -> Self {
        Self {
            behaviour: Mutex::new(options.behaviour.clone()),
            options,
            handle,
            started: Instant::now(),
            book: AddressBook::default(),
            closing: watch::Sender::new(false),
            table: Mutex::default(),
        }
    }

    /// A new connection: its snapshot begins. Running proxies are kept. Gives the connection's number.
    pub(super) fn begin(&self) -> u32 {
        let mut table = lock(&self.table);
        table.connections += 1;
        table.snapshot = Some(BTreeSet::new());
        table.pending.clear();
        table.connections
    }

    pub(super) fn disconnected(&self) {
        lock(&self.table).ready = false;
    }

    /// Takes a pod in, as ztunnel does: same netns, nothing happens; another netns, the old proxy ends at once.
    pub(super) fn add(&self, uid: &str, info: WorkloadInfo, netns: OwnedFd) -> Result<(), String> {
        let netns = Netns::from_fd(netns);
        {
            let mut table = lock(&self.table);
            if let Some(snapshot) = &mut table.snapshot {
                snapshot.insert(uid.to_owned());
            }
            if table
                .workloads
                .get(uid)
                .is_some_and(|held| held.netns.inode() == netns.inode())
            {
                return Ok(());
            }
        }
        let made = self.start(info, netns.clone());
        let mut table = lock(&self.table);
        match made {
            Ok(workload) => {
                table.pending.remove(uid);
                table.workloads.insert(uid.to_owned(), workload);
                Ok(())
            }
            Err(error) => {
                table.pending.insert(uid.to_owned(), netns);
                Err(format!("failure to start proxy : {error}"))
            }
        }
    }

    fn start(&self, info: WorkloadInfo, netns: Netns) -> std::io::Result<Workload> {
        let counters = Arc::new(Counters::default());
        let mut workload = Workload {
            info,
            netns: netns.clone(),
            addresses: Vec::new(),
            counters: counters.clone(),
            task: None,
            book: self.book.clone(),
        };
        if !self.options.no_listeners {
            let mut listening = Listening::open(&netns)?;
            workload.addresses = std::mem::take(&mut listening.addresses);
            self.book.change(&workload.addresses, true);
            let relay = Relay {
                netns,
                counters,
                tunnel_to: self.options.tunnel.then(|| self.book.clone()),
                dns_upstream: self.options.dns_upstream,
            };
            workload.task = Some(
                self.handle
                    .spawn(relay.serve(listening, self.closing.subscribe())),
            );
        }
        Ok(workload)
    }

    /// Keeps the netns of a refused ADD, as ztunnel does.
    pub(super) fn hold_refused(&self, uid: &str, netns: OwnedFd) {
        let mut table = lock(&self.table);
        if let Some(snapshot) = &mut table.snapshot {
            snapshot.insert(uid.to_owned());
        }
        table.pending.insert(uid.to_owned(), Netns::from_fd(netns));
    }

    /// Only before the snapshot is complete.
    pub(super) fn keep(&self, uid: &str) -> Result<(), String> {
        match &mut lock(&self.table).snapshot {
            Some(snapshot) => {
                snapshot.insert(uid.to_owned());
                Ok(())
            }
            None => Err("failure to process message : keep after the snapshot".to_owned()),
        }
    }

    /// Lets a pod go; its connections end at once. During a snapshot it goes when the snapshot is complete.
    pub(super) fn delete(&self, uid: &str) {
        let mut table = lock(&self.table);
        table.pending.remove(uid);
        match &mut table.snapshot {
            Some(snapshot) => {
                snapshot.remove(uid);
            }
            None => {
                table.workloads.remove(uid);
            }
        }
    }

    /// The snapshot is complete: what it did not name goes.
    pub(super) fn snapshot_sent(&self) -> Result<(), String> {
        let mut table = lock(&self.table);
        let Some(named) = table.snapshot.take() else {
            return Err("failure to process message : snapshot sent twice".to_owned());
        };
        table.workloads.retain(|uid, _| named.contains(uid));
        table.ready = true;
        Ok(())
    }

    pub(super) fn record(&self, mut message: ZdsMessage) {
        message.at_us = u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX);
        let mut table = lock(&self.table);
        if table.messages.len() >= MESSAGES_KEPT {
            table.messages.drain(..MESSAGES_KEPT / 10);
        }
        table.messages.push(message);
    }

    pub(super) fn forget_messages(&self) {
        lock(&self.table).messages.clear();
    }

    pub(super) fn report(&self, with_messages: bool) -> Report {
        let table = lock(&self.table);
        let workload = |held: &Workload| WorkloadReport {
            pod: format!("{}/{}", held.info.namespace, held.info.name),
            service_account: held.info.service_account.clone(),
            netns_inode: held.netns.inode(),
            listening: held.task.as_ref().is_some_and(|task| !task.is_finished()),
            addresses: held.addresses.clone(),
            counts: held.counters.read(),
        };
        Report {
            ready: table.ready && table.pending.is_empty(),
            connections: table.connections,
            messages: if with_messages {
                table.messages.clone()
            } else {
                Vec::new()
            },
            workloads: table
                .workloads
                .iter()
                .map(|(uid, held)| (uid.clone(), workload(held)))
                .collect(),
            pending: table
                .pending
                .iter()
                .map(|(uid, netns)| (uid.clone(), netns.inode()))
                .collect(),
        }
    }

    /// Closes all listeners and waits until the last connection ended.
    pub(super) async fn drain(&self) {
        let mut tasks: Vec<_> = lock(&self.table)
            .workloads
            .values_mut()
            .filter_map(|workload| workload.task.take())
            .collect();
        self.closing.send_replace(true);
        for task in &mut tasks {
            let _ = task.await;
        }
    }
}
