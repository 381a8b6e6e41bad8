//! A stand-in API server over TCP: keeps objects, lists and watches them, and misbehaves on command.

use std::collections::BTreeMap;
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

struct Rule {
    method: &'static str,
    path: &'static str,
    watch: Option<bool>,
    fault: Fault,
    left: usize,
}

#[derive(Default)]
struct State {
    version: u64,
    objects: BTreeMap<String, Value>,
    history: Vec<(u64, String, Value)>,
    rules: Vec<Rule>,
    seen: Vec<Seen>,
    token: Option<String>,
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
            .filter(|seen| seen.method == method && seen.path.contains(path));
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

fn reply(code: u16, body: &Value) -> Response<Body> {
    let body = Either::Left(Full::new(Bytes::from(body.to_string())));
    Response::builder().status(code).body(body).unwrap()
}

fn status(code: u16, retry_after: Option<u64>) -> Response<Body> {
    let body = json!({"kind": "Status", "status": "Failure", "code": code, "reason": "Scripted", "message": "scripted"});
    let mut response = reply(code, &body);
    if let Some(seconds) = retry_after {
        response
            .headers_mut()
            .insert("retry-after", seconds.to_string().parse().unwrap());
    }
    response
}

impl State {
    fn begin(&mut self, seen: &Seen) -> Option<Fault> {
        self.seen.push(seen.clone());
        if self
            .token
            .as_ref()
            .is_some_and(|token| seen.token != format!("Bearer {token}"))
        {
            return Some(Fault::Code(401));
        }
        let rule = self.rules.iter_mut().find(|rule| {
            rule.left > 0
                && rule.method == seen.method
                && seen.path.ends_with(rule.path)
                && rule.watch.is_none_or(|watch| watch == seen.is_watch())
        })?;
        rule.left -= 1;
        Some(rule.fault.clone())
    }

    fn put(&mut self, path: &str, mut object: Value, news: &broadcast::Sender<()>) -> u64 {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let known = self.objects.insert(path.to_owned(), object.clone()).is_some();
        let kind = if known { "MODIFIED" } else { "ADDED" };
        self.history.push((
            self.version,
            path.to_owned(),
            json!({"type": kind, "object": object}),
        ));
        let _ = news.send(());
        self.version
    }

    /// Whether an object belongs to a collection: `/api/v1/pods` holds those of all namespaces.
    fn belongs(path: &str, seen: &Seen) -> bool {
        let (collection, rest) = path.rsplit_once('/').unwrap();
        let kind = collection.rsplit_once('/').unwrap().1;
        let name = seen.query.split("fieldSelector=metadata.name%3D").nth(1);
        let named = name.is_none_or(|name| name.split('&').next() == Some(rest));
        let every = seen.path == format!("/api/v1/{kind}");
        named && (collection == seen.path || every)
    }

    fn since(&self, version: u64, seen: &Seen) -> Vec<(u64, Value)> {
        let newer = self
            .history
            .iter()
            .filter(|(at, path, _)| *at > version && Self::belongs(path, seen));
        newer.map(|(at, _, event)| (*at, event.clone())).collect()
    }

    fn handle(&mut self, seen: &Seen, news: &broadcast::Sender<()>) -> Response<Body> {
        let path = seen.path.trim_end_matches("/status").to_owned();
        match seen.method.as_str() {
            "GET" => match self.objects.get(&path) {
                Some(object) => reply(200, object),
                None if path.ends_with("s")
                    && path
                        .rsplit('/')
                        .next()
                        .is_some_and(|end| end == "pods" || end == "namespaces") =>
                {
                    let items: Vec<_> = self
                        .objects
                        .iter()
                        .filter(|(at, _)| Self::belongs(at, seen))
                        .map(|(_, o)| o)
                        .collect();
                    reply(
                        200,
                        &json!({"metadata": {"resourceVersion": self.version.to_string()}, "items": items}),
                    )
                }
                None => status(404, None),
            },
            "PATCH" => {
                let Some(mut object) = self.objects.get(&path).cloned() else {
                    return status(404, None);
                };
                if let Some(uid) = seen.body["metadata"]["uid"].as_str()
                    && object["metadata"]["uid"] != uid
                {
                    return status(409, None);
                }
                merge(&mut object, &seen.body);
                self.put(&path, object.clone(), news);
                reply(200, &self.objects[&path])
            }
            "POST" if path.ends_with("/token") => {
                let expires = jiff::Timestamp::now() + Duration::from_secs(3600);
                reply(
                    201,
                    &json!({"status": {"token": "plugin-token", "expirationTimestamp": expires.to_string()}}),
                )
            }
            "POST" => {
                let name = seen.body["metadata"]["name"].as_str().unwrap().to_owned();
                self.put(&format!("{path}/{name}"), seen.body.clone(), news);
                reply(201, &seen.body)
            }
            _ => status(405, None),
        }
    }
}

/// RFC 7386.
fn merge(object: &mut Value, patch: &Value) {
    let Some(fields) = patch.as_object() else {
        *object = patch.clone();
        return;
    };
    if !object.is_object() {
        *object = json!({});
    }
    for (key, value) in fields {
        if value.is_null() {
            object.as_object_mut().unwrap().remove(key);
        } else {
            merge(&mut object[key], value);
        }
    }
}
