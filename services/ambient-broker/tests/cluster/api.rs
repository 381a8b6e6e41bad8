//! A stand-in API server over TCP: keeps objects, lists and watches them, and misbehaves on command.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http_body_util::{BodyExt, Either, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::broadcast;
use tokio_stream::wrappers::ReceiverStream;

use store::{Rule, State, status};

#[path = "api/store.rs"]
mod store;

/// How a request is answered instead of properly.
#[derive(Debug, Clone)]
pub(crate) enum Fault {
    /// With this status code.
    Code(u16),
    /// 429 with `Retry-After` in seconds.
    Later(u64),
    /// Never.
    Hang,
    /// Properly, but a watch sends nothing more from now on and does not end.
    Freeze,
    /// Properly, but a watch is cut off in the middle of a line.
    Cut,
    /// A watch is told that its version is too old.
    Gone,
}

/// A request as it came.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) query: String,
    pub(crate) token: String,
    pub(crate) kind: String,
    pub(crate) body: Value,
    pub(crate) at: std::time::Instant,
}

impl Seen {
    pub(crate) fn is_watch(&self) -> bool {
        self.query.contains("watch=true")
    }
}

/// The server. Clones share it.
#[derive(Clone)]
pub(crate) struct Api {
    state: Arc<Mutex<State>>,
    news: broadcast::Sender<()>,
    address: SocketAddr,
    directory: Arc<tempfile::TempDir>,
    serving: Arc<Mutex<Option<tokio::task::JoinHandle<()>>>>,
}

type Body = Either<Full<Bytes>, StreamBody<ReceiverStream<Result<Frame<Bytes>, std::io::Error>>>>;

impl Api {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let api = Self {
            state: Arc::default(),
            news: broadcast::channel(64).0,
            address: listener.local_addr().unwrap(),
            directory: Arc::new(tempfile::tempdir().unwrap()),
            serving: Arc::default(),
        };
        api.serve(listener);
        api
    }

    fn serve(&self, listener: TcpListener) {
        let api = self.clone();
        let serving = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let api = api.clone();
                connections.spawn(async move {
                    let service = service_fn(move |request| api.clone().answer(request));
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        *self.serving.lock().unwrap() = Some(serving);
    }

    /// Closes the port and every connection.
    pub(crate) async fn down(&self) {
        let serving = self.serving.lock().unwrap().take().unwrap();
        serving.abort();
        let _ = serving.await;
    }

    /// Opens the port again.
    pub(crate) async fn up(&self) {
        let until = std::time::Instant::now() + Duration::from_secs(5);
        loop {
            match TcpListener::bind(self.address).await {
                Ok(listener) => return self.serve(listener),
                Err(error) => assert!(std::time::Instant::now() < until, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub(crate) fn token_file(&self) -> PathBuf {
        self.directory.path().join("token")
    }

    /// A kubeconfig file that leads here; the token is read from [`Api::token_file`].
    pub(crate) fn kubeconfig(&self) -> PathBuf {
        if !self.token_file().exists() {
            std::fs::write(self.token_file(), "first").unwrap();
        }
        let path = self.directory.path().join("kubeconfig");
        let text = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": format!("http://{}", self.address)}}],
            "users": [{"name": "u", "user": {"tokenFile": self.token_file()}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        });
        std::fs::write(&path, text.to_string()).unwrap();
        path
    }

    /// From now on only this token counts.
    pub(crate) fn require_token(&self, token: &str) {
        self.state.lock().unwrap().token = Some(token.to_owned());
    }

    /// The next `times` matching requests meet a fault.
    pub(crate) fn fault(&self, method: &'static str, path: &'static str, fault: Fault, times: usize) {
        self.add_rule(method, path, None, fault, times);
    }

    /// As [`Api::fault`], but only watches.
    pub(crate) fn watch_fault(&self, path: &'static str, fault: Fault, times: usize) {
        self.add_rule("GET", path, Some(true), fault, times);
    }

    fn add_rule(
        &self,
        method: &'static str,
        path: &'static str,
        watch: Option<bool>,
        fault: Fault,
        left: usize,
    ) {
        let rule = Rule {
            method,
            path,
            watch,
            fault,
            left,
        };
        self.state.lock().unwrap().rules.push(rule);
    }

    pub(crate) fn seen(&self, method: &str, path: &str) -> Vec<Seen> {
        let state = self.state.lock().unwrap();
        let matching = state
            .seen
            .iter()
            .filter(|seen| (method.is_empty() || seen.method == method) && seen.path.contains(path));
        matching.cloned().collect()
    }

    pub(crate) fn lists(&self, path: &str) -> usize {
        self.seen("GET", path)
            .iter()
            .filter(|seen| seen.path.ends_with(path) && !seen.is_watch())
            .count()
    }

    pub(crate) fn watches(&self, path: &str) -> usize {
        self.seen("GET", path)
            .iter()
            .filter(|seen| seen.path.ends_with(path) && seen.is_watch())
            .count()
    }

    /// Creates or changes an object.
    pub(crate) fn put(&self, path: &str, object: Value) -> u64 {
        self.state.lock().unwrap().put(path, object, &self.news)
    }

    pub(crate) fn object(&self, path: &str) -> Option<Value> {
        self.state.lock().unwrap().objects.get(path).cloned()
    }

    pub(crate) fn delete(&self, path: &str) {
        let mut state = self.state.lock().unwrap();
        state.version += 1;
        let version = state.version;
        let Some(mut last) = state.objects.remove(path) else {
            return;
        };
        last["metadata"]["resourceVersion"] = json!(version.to_string());
        state.history.push((
            version,
            path.to_owned(),
            json!({"type": "DELETED", "object": last}),
        ));
        let _ = self.news.send(());
    }

    async fn answer(self, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
        let (parts, body) = request.into_parts();
        let body = body
            .collect()
            .await
            .map(http_body_util::Collected::to_bytes)
            .unwrap_or_default();
        let header = |name: &str| {
            parts
                .headers
                .get(name)
                .and_then(|v| v.to_str().ok())
                .unwrap_or_default()
        };
        let seen = Seen {
            method: parts.method.to_string(),
            path: parts.uri.path().to_owned(),
            query: parts.uri.query().unwrap_or_default().to_owned(),
            token: header("authorization").to_owned(),
            kind: header("content-type").to_owned(),
            body: serde_json::from_slice(&body).unwrap_or_default(),
            at: std::time::Instant::now(),
        };
        let fault = self.state.lock().unwrap().begin(&seen);
        match fault {
            Some(Fault::Hang) => std::future::pending().await,
            Some(Fault::Code(code)) => return Ok(status(code, None)),
            Some(Fault::Later(seconds)) => return Ok(status(429, Some(seconds))),
            _ => {}
        }
        Ok(if seen.is_watch() {
            self.watch(&seen, fault)
        } else {
            self.state.lock().unwrap().handle(&seen, &self.news)
        })
    }

    fn watch(&self, seen: &Seen, fault: Option<Fault>) -> Response<Body> {
        let (sender, receiver) = tokio::sync::mpsc::channel(16);
        let parameter = |name: &str| {
            let query = seen
                .query
                .split('&')
                .find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
            query.and_then(|value| value.parse::<u64>().ok())
        };
        let mut version = parameter("resourceVersion").unwrap();
        let until = tokio::time::Instant::now() + Duration::from_secs(parameter("timeoutSeconds").unwrap());
        let (api, seen) = (self.clone(), seen.clone());
        tokio::spawn(async move {
            let line = |value: &Value| Ok(Frame::data(Bytes::from(format!("{value}\n"))));
            let mut news = api.news.subscribe();
            if matches!(fault, Some(Fault::Gone)) {
                let gone = json!({"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired",
                    "message": "too old resource version"}});
                let _ = sender.send(line(&gone)).await;
                return;
            }
            loop {
                let events = api.state.lock().unwrap().since(version, &seen);
                for (at, event) in events {
                    version = at;
                    match fault {
                        Some(Fault::Freeze) => std::future::pending().await,
                        Some(Fault::Cut) => {
                            let half = Bytes::from(event.to_string()[..20].to_owned());
                            let _ = sender.send(Ok(Frame::data(half))).await;
                            let _ = sender.send(Err(std::io::Error::other("cut"))).await;
                            return;
                        }
                        _ => {}
                    }
                    if sender.send(line(&event)).await.is_err() {
                        return;
                    }
                }
                if matches!(fault, Some(Fault::Freeze)) {
                    let () = sender.closed().await;
                    return;
                }
                tokio::select! {
                    _ = news.recv() => {}
                    () = tokio::time::sleep_until(until) => return,
                    () = sender.closed() => return,
                }
            }
        });
        Response::new(Either::Right(StreamBody::new(ReceiverStream::new(receiver))))
    }
}
