//! The objects, their history, and what was asked.

use std::collections::BTreeMap;
use std::time::Duration;

use http_body_util::{Either, Full};
use hyper::Response;
use hyper::body::Bytes;
use serde_json::{Value, json};
use tokio::sync::broadcast;

use super::{Body, Fault, Seen};

pub(super) struct Rule {
    pub(super) method: &'static str,
    pub(super) path: &'static str,
    pub(super) watch: Option<bool>,
    pub(super) fault: Fault,
    pub(super) left: usize,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) version: u64,
    pub(super) objects: BTreeMap<String, Value>,
    pub(super) history: Vec<(u64, String, Value)>,
    pub(super) rules: Vec<Rule>,
    pub(super) seen: Vec<Seen>,
    pub(super) token: Option<String>,
}

pub(super) fn reply(code: u16, body: &Value) -> Response<Body> {
    let body = Either::Left(Full::new(Bytes::from(body.to_string())));
    Response::builder().status(code).body(body).unwrap()
}

pub(super) fn status(code: u16, retry_after: Option<u64>) -> Response<Body> {
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
    pub(super) fn begin(&mut self, seen: &Seen) -> Option<Fault> {
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

    pub(super) fn put(&mut self, path: &str, mut object: Value, news: &broadcast::Sender<()>) -> u64 {
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
    pub(super) fn belongs(path: &str, object: &Value, seen: &Seen) -> bool {
        let (collection, rest) = path.rsplit_once('/').unwrap();
        let kind = collection.rsplit_once('/').unwrap().1;
        let selected = |field: &str, value: Option<&str>| {
            let wanted = seen.query.split(&format!("fieldSelector={field}%3D")).nth(1);
            wanted.is_none_or(|wanted| wanted.split('&').next() == value)
        };
        let named = selected("metadata.name", Some(rest));
        let named = named && selected("spec.nodeName", object["spec"]["nodeName"].as_str());
        let every = seen.path == format!("/api/v1/{kind}");
        named && (collection == seen.path || every)
    }

    pub(super) fn since(&self, version: u64, seen: &Seen) -> Vec<(u64, Value)> {
        let newer = self
            .history
            .iter()
            .filter(|(at, path, event)| *at > version && Self::belongs(path, &event["object"], seen));
        newer.map(|(at, _, event)| (*at, event.clone())).collect()
    }

    pub(super) fn handle(&mut self, seen: &Seen, news: &broadcast::Sender<()>) -> Response<Body> {
        let path = seen.path.trim_end_matches("/status").to_owned();
        match seen.method.as_str() {
            "GET" => match self.objects.get(&path) {
                Some(object) => reply(200, object),
                None if path.ends_with('s')
                    && path
                        .rsplit('/')
                        .next()
                        .is_some_and(|end| end == "pods" || end == "namespaces") =>
                {
                    let items: Vec<_> = self
                        .objects
                        .iter()
                        .filter(|(at, object)| Self::belongs(at, object, seen))
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
                    // As kube-apiserver does: the field is immutable.
                    return status(422, None);
                }
                merge(&mut object, &seen.body);
                self.put(&path, object.clone(), news);
                reply(200, &self.objects[&path])
            }
            "POST" if path.ends_with("/token") => {
                let expires = jiff::Timestamp::now() + Duration::from_hours(1);
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
pub(super) fn merge(object: &mut Value, patch: &Value) {
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
