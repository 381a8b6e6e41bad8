//! Requests from inside a netns: one, or a steady load over new and kept connections that counts every failure.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::Worker;
use super::connection::Connection;
use super::server::Seen;
use crate::netns::Netns;
use crate::pod::lock;

pub(super) const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nhost: app\r\n\r\n";

/// One request from inside `netns` to an [`EchoServer`](super::server::EchoServer) at `target`.
pub fn fetch(netns: &Netns, target: SocketAddr, timeout: Duration) -> io::Result<Seen> {
    Connection::open(netns, target, timeout)?.ask()
}

/// One datagram from inside `netns`; gives the address the application saw.
pub fn datagram(netns: &Netns, target: SocketAddr, timeout: Duration) -> io::Result<SocketAddr> {
    netns.run(|| {
        let any: IpAddr = if target.is_ipv4() {
            [0, 0, 0, 0].into()
        } else {
            [0u16; 8].into()
        };
        let socket = std::net::UdpSocket::bind((any, 0))?;
        socket.set_read_timeout(Some(timeout))?;
        socket.connect(target)?;
        socket.send(b"?")?;
        let mut buffer = [0; 128];
        let len = socket.recv(&mut buffer)?;
        String::from_utf8_lossy(&buffer[..len])
            .parse()
            .map_err(io::Error::other)
    })
}

/// The head of an answer, line by line.
#[derive(Debug, Default)]
pub(super) struct Head {
    pub(super) length: usize,
    pub(super) complete: bool,
}

impl Head {
    pub(super) fn take(&mut self, line: &str) -> io::Result<()> {
        if line.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let line = line.trim_end().to_ascii_lowercase();
        if let Some(length) = line.strip_prefix("content-length:") {
            self.length = length.trim().parse().map_err(io::Error::other)?;
        }
        self.complete = line.is_empty();
        Ok(())
    }
}

/// What load to make.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// The application.
    pub target: SocketAddr,
    /// Requests a second, each over a connection of its own.
    pub new_per_second: u32,
    /// Connections that are kept open.
    pub kept: usize,
    /// Requests a second over each kept connection.
    pub kept_per_second: u32,
    /// A request without an answer after this has failed.
    pub timeout: Duration,
}

impl LoadOptions {
    /// 200 requests a second over new connections, 20 kept ones with 10 requests a second each, 2 s to answer.
    pub fn new(target: SocketAddr) -> Self {
        Self {
            target,
            new_per_second: 200,
            kept: 20,
            kept_per_second: 10,
            timeout: Duration::from_secs(2),
        }
    }

    /// Without kept connections.
    #[must_use]
    pub fn only_new(mut self, per_second: u32) -> Self {
        self.new_per_second = per_second;
        self.kept = 0;
        self
    }
}

/// A request that failed.
#[derive(Debug, Clone)]
pub struct Failure {
    /// When it was sent, since the start of the load.
    pub sent_at: Duration,
    /// When it was seen to have failed, since the start of the load.
    pub failed_at: Duration,
    /// Whether it went over a kept connection.
    pub kept: bool,
    /// Why.
    pub error: String,
}

/// What came of the load.
#[derive(Debug, Clone, Default)]
pub struct LoadReport {
    /// Answered requests over new connections.
    pub new_answered: u64,
    /// Answered requests over kept connections.
    pub kept_answered: u64,
    /// Everything that failed (the first 10,000). A kept connection that broke is opened again.
    pub failures: Vec<Failure>,
    /// The longest time an answered request took.
    pub slowest: Duration,
    /// How often the application saw each client address.
    pub seen_as: BTreeMap<IpAddr, u64>,
    /// How long the load has run.
    pub ran: Duration,
}

impl LoadReport {
    /// Answered requests.
    pub fn answered(&self) -> u64 {
        self.new_answered + self.kept_answered
    }

    /// Fails unless so many requests a second were answered over new connections, but for one in four: a machine too
    /// busy to make the load shows nothing about it.
    pub fn kept_pace(&self, per_second: u32) -> anyhow::Result<()> {
        let due = self.ran.as_millis() * u128::from(per_second) / 1000;
        anyhow::ensure!(
            u128::from(self.new_answered) * 4 >= due * 3,
            "{} requests over new connections in {:?}, {due} were due",
            self.new_answered,
            self.ran
        );
        Ok(())
    }

    /// Fails, showing the first few, if any request failed, or if none was answered.
    pub fn nothing_failed(&self) -> anyhow::Result<()> {
        anyhow::ensure!(
            self.answered() > 0,
            "no request was answered; failures: {:?}",
            self.failures.first()
        );
        let shown: Vec<_> = self.failures.iter().take(5).collect();
        let all = self.answered() + self.failures.len() as u64;
        anyhow::ensure!(
            shown.is_empty(),
            "{} of {all} requests failed, first: {shown:?}",
            self.failures.len()
        );
        Ok(())
    }
}

/// A running load. Dropping it ends it.
#[derive(Debug)]
pub struct Load {
    report: Arc<Mutex<LoadReport>>,
    worker: Worker<()>,
    started: Instant,
}

impl Load {
    /// Starts the load from inside `netns`.
    pub fn start(netns: &Netns, options: LoadOptions) -> io::Result<Self> {
        let report = Arc::new(Mutex::new(LoadReport::default()));
        let started = Instant::now();
        let generator = Generator {
            options,
            report: report.clone(),
            started,
        };
        let worker = Worker::start(netns, "load", move |stop| generator.run(stop))?;
        Ok(Self {
            report,
            worker,
            started,
        })
    }

    /// When it started; the times in the report count from here.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// The report so far.
    pub fn report(&self) -> LoadReport {
        lock(&self.report).clone()
    }

    /// Waits until `requests` more were answered, so that the load is known to flow.
    pub fn wait_answered(&self, requests: u64, within: Duration) -> anyhow::Result<()> {
        let until = lock(&self.report).answered() + requests;
        let what = format!("{requests} requests are answered");
        crate::wait::poll_true(&what, within, || lock(&self.report).answered() >= until)
            .map_err(|late| anyhow::anyhow!("{late}; last failure: {:?}", lock(&self.report).failures.last()))
    }

    /// Ends the load, waits for the requests under way, and gives the report.
    pub fn stop(self) -> LoadReport {
        let ran = self.started.elapsed();
        self.worker.stop();
        LoadReport {
            ran,
            ..lock(&self.report).clone()
        }
    }
}

#[derive(Debug, Clone)]
struct Generator {
    options: LoadOptions,
    report: Arc<Mutex<LoadReport>>,
    started: Instant,
}

impl Generator {
    async fn run(self, mut stop: watch::Receiver<bool>) {
        let mut requests = JoinSet::new();
        let mut kept = JoinSet::new();
        for _ in 0..self.options.kept {
            kept.spawn(self.clone().keep(stop.clone()));
        }
        let mut tick = tokio::time::interval(period(self.options.new_per_second));
        // The pace is kept on the average, whatever the machine does in between.
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Burst);
        loop {
            tokio::select! {
                _ = tick.tick(), if self.options.new_per_second > 0 => { requests.spawn(self.clone().once()); }
                Some(_) = requests.join_next() => {}
                _ = stop.wait_for(|stop| *stop) => break,
            }
        }
        while requests.join_next().await.is_some() {}
        while kept.join_next().await.is_some() {}
    }

    async fn once(self) {
        let sent = Instant::now();
        let outcome = self.in_time(async {
            let mut stream = self.connect().await?;
            ask(&mut stream).await
        });
        match outcome.await {
            Ok(seen) => {
                let mut report = lock(&self.report);
                report.new_answered += 1;
                note(&mut report, &seen, sent.elapsed());
            }
            Err(error) => self.failed(sent, false, &error),
        }
    }

    async fn keep(self, mut stop: watch::Receiver<bool>) {
        let mut tick = tokio::time::interval(period(self.options.kept_per_second));
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut stream = None;
        loop {
            tokio::select! {
                _ = tick.tick() => {}
                _ = stop.wait_for(|stop| *stop) => return,
            }
            let sent = Instant::now();
            let outcome = self.in_time(async {
                let mut open = match stream.take() {
                    Some(open) => open,
                    None => self.connect().await?,
                };
                let seen = ask(&mut open).await?;
                Ok((open, seen))
            });
            match outcome.await {
                Ok((open, seen)) => {
                    stream = Some(open);
                    let mut report = lock(&self.report);
                    report.kept_answered += 1;
                    note(&mut report, &seen, sent.elapsed());
                }
                Err(error) => self.failed(sent, true, &error),
            }
        }
    }

    async fn connect(&self) -> io::Result<BufReader<TcpStream>> {
        let stream = TcpStream::connect(self.options.target).await?;
        stream.set_nodelay(true)?;
        Ok(BufReader::new(stream))
    }

    async fn in_time<T>(&self, request: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        let late = |_| {
            io::Error::new(
                io::ErrorKind::TimedOut,
                format!("no answer within {:?}", self.options.timeout),
            )
        };
        tokio::time::timeout(self.options.timeout, request)
            .await
            .map_err(late)?
    }

    fn failed(&self, sent: Instant, kept: bool, error: &io::Error) {
        let mut report = lock(&self.report);
        if report.failures.len() < 10_000 {
            report.failures.push(Failure {
                sent_at: sent - self.started,
                failed_at: self.started.elapsed(),
                kept,
                error: error.to_string(),
            });
        }
    }
}

fn period(per_second: u32) -> Duration {
    Duration::from_secs(1) / per_second.max(1)
}

fn note(report: &mut LoadReport, seen: &Seen, took: Duration) {
    report.slowest = report.slowest.max(took);
    *report.seen_as.entry(seen.peer.ip()).or_default() += 1;
}

async fn ask(stream: &mut BufReader<TcpStream>) -> io::Result<Seen> {
    stream.get_mut().write_all(REQUEST).await?;
    let mut head = Head::default();
    let mut line = String::new();
    while !head.complete {
        line.clear();
        stream.read_line(&mut line).await?;
        head.take(&line)?;
    }
    let mut body = vec![0; head.length];
    stream.read_exact(&mut body).await?;
    Ok(serde_json::from_slice(&body)?)
}
