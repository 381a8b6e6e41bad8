//! `/cmdadd` as an installed istio-cni plugin calls it, for nodes that are being moved over: the plugin that is
//! already in the conflist keeps working until Sluice's own has taken its place.
//!
//! The request names a netns by path. The broker opens nothing: the executor has the path opened by the opener and
//! then treats the sandbox like that of any running pod.

use std::net::IpAddr;
use std::time::Duration;

use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use serde::Deserialize;
use sluice_proto::code::ErrorCode;
use sluice_proto::id::{Namespace, NetnsPath, PodName, PodRef, PodUid};
use sluice_proto::sandbox::{Failure, NetnsIdentity};
use tokio::sync::{mpsc, oneshot};

use crate::driver::Query;
use crate::executor::Executor;
use crate::http::{Handler, Reply, TEXT, reply};
use crate::metrics::Metrics;
use crate::reconcile::Event;
use crate::reconcile::report::{PodReport, Standing};
use crate::registry::Registry;

/// An ADD event is a few hundred bytes; the plugin's client gives up after 5 s.
const MAX_BODY: usize = 64 * 1024;
const BODY: Duration = Duration::from_secs(2);
const LIMIT: Duration = Duration::from_millis(4_500);
/// How long an unknown pod is asked for again.
const LOOKUP: Duration = Duration::from_secs(1);
const LOOKUP_PAUSE: Duration = Duration::from_millis(20);

/// The plugin's event. Field names are Go's, matched without regard to case; unknown ones are ignored.
#[derive(Debug, Default)]
struct AddEvent {
    netns: String,
    pod_name: String,
    pod_namespace: String,
    /// Not sent by Istio's plugin; checked where it is.
    pod_uid: String,
    ips: Vec<IpAddr>,
}

/// Why a request cannot be served.
#[derive(Debug, thiserror::Error)]
enum CompatError {
    #[error("empty request body")]
    Empty,
    #[error("request body is longer than {MAX_BODY} bytes, or did not come within {BODY:?}")]
    Body,
    #[error("request body is not an ADD event")]
    Json(#[from] serde_json::Error),
    #[error("address {0:?} is not an IP address")]
    Address(String),
    #[error(transparent)]
    Id(#[from] sluice_proto::id::InvalidId),
    #[error("the pod source knows no pod {0}")]
    UnknownPod(String),
    #[error("pod {pod} has uid {has}, the request says {says}")]
    OtherUid { pod: String, has: String, says: String },
    #[error("pod {pod} is unexpectedly not eligible for ambient enrollment: {verdict}")]
    NotEligible { pod: String, verdict: String },
    #[error(transparent)]
    Failed(#[from] Failure),
    #[error("not enrolled within {LIMIT:?}: {0}")]
    Timeout(String),
    #[error("the broker is shutting down")]
    Stopping,
}

impl CompatError {
    fn status(&self) -> StatusCode {
        match self {
            Self::Empty | Self::Body | Self::Json(_) | Self::Address(_) | Self::Id(_) => {
                StatusCode::BAD_REQUEST
            }
            Self::Failed(failure) if failure.code == ErrorCode::OpenerUnavailable => {
                StatusCode::NOT_IMPLEMENTED
            }
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

/// The endpoint.
#[derive(Debug, Clone)]
pub(crate) struct Compatibility {
    pub(crate) executor: Executor,
    pub(crate) events: mpsc::UnboundedSender<Event>,
    pub(crate) queries: mpsc::Sender<Query>,
    pub(crate) registry: Registry,
    pub(crate) metrics: std::sync::Arc<Metrics>,
}

impl Handler for Compatibility {
    async fn handle(&self, request: Request<Incoming>) -> Reply {
        if request.uri().path() != "/cmdadd" {
            return reply(StatusCode::NOT_FOUND, TEXT, "404 page not found\n");
        }
        let (status, text) = match self.add(request).await {
            Ok(()) => (StatusCode::OK, String::new()),
            Err(error) => {
                let text = sluice_runtime::telemetry::chain(&error);
                tracing::warn!(error = text, "ADD of an istio-cni plugin failed");
                (error.status(), text + "\n")
            }
        };
        self.metrics.plugin_request(status.as_u16());
        reply(status, TEXT, text)
    }
}

impl Compatibility {
    async fn add(&self, request: Request<Incoming>) -> Result<(), CompatError> {
        let body = tokio::time::timeout(BODY, Limited::new(request.into_body(), MAX_BODY).collect())
            .await
            .map_err(|_| CompatError::Body)?
            .map_err(|_| CompatError::Body)?
            .to_bytes();
        let event = parse(&body)?;
        let netns = NetnsPath::parse(event.netns.clone())?;
        let namespace = Namespace::parse(event.pod_namespace.clone())?;
        let name = PodName::parse(event.pod_name.clone())?;
        let pod = self.pod(&namespace, &name, &event.pod_uid).await?;
        let changes = self.registry.subscribe();
        let sandbox = self
            .executor
            .adopt_at(&pod, &event.ips, Some(netns.as_str()))
            .await?;
        let netns = sandbox.netns.clone();
        let _ = self.events.send(Event::Adopted {
            pod: pod.uid.clone(),
            result: Ok(Box::new(sandbox)),
        });
        self.enrolled(&pod.uid, &netns, changes).await
    }

    /// The pod by name: asked for again while the source may lag behind.
    async fn pod(&self, namespace: &Namespace, name: &PodName, uid: &str) -> Result<PodRef, CompatError> {
        let until = tokio::time::Instant::now() + LOOKUP;
        loop {
            let (reply, answer) = oneshot::channel();
            let query = Query::Explain {
                namespace: namespace.clone(),
                name: name.clone(),
                reply,
            };
            self.queries
                .send(query)
                .await
                .map_err(|_| CompatError::Stopping)?;
            let found = answer.await.map_err(|_| CompatError::Stopping)?;
            match found.and_then(|found| Some((found.report.pod.clone(), found.selection?))) {
                Some((pod, _)) if !uid.is_empty() && pod.uid.as_str() != uid => {
                    return Err(CompatError::OtherUid {
                        pod: pod.to_string(),
                        has: pod.uid.to_string(),
                        says: PodUid::parse(uid)?.to_string(),
                    });
                }
                Some((pod, verdict)) if !verdict.is_in() => {
                    return Err(CompatError::NotEligible {
                        pod: pod.to_string(),
                        verdict: verdict.reason.to_string(),
                    });
                }
                Some((pod, _)) => return Ok(pod),
                None if tokio::time::Instant::now() >= until => {
                    return Err(CompatError::UnknownPod(format!("{namespace}/{name}")));
                }
                None => tokio::time::sleep(LOOKUP_PAUSE).await,
            }
        }
    }

    /// Waits until the pod is in the mesh with this netns.
    async fn enrolled(
        &self,
        uid: &PodUid,
        netns: &NetnsIdentity,
        mut changes: crate::registry::Subscription,
    ) -> Result<(), CompatError> {
        let mut last = String::from("nothing heard of it");
        let wait = async {
            loop {
                let report = self.registry.report(uid);
                if let Some(report) = report {
                    match progress(&report, netns) {
                        None => return Ok(()),
                        Some(missing) => last = missing,
                    }
                }
                if changes.next().await.is_none() {
                    return Err(CompatError::Stopping);
                }
            }
        };
        let waited = tokio::time::timeout(LIMIT, wait).await;
        match waited {
            Ok(done) => done,
            Err(_) => Err(CompatError::Timeout(last)),
        }
    }
}

/// What keeps the report from saying that this netns is in the mesh; `None`: nothing. The report of an earlier
/// sandbox of the same pod says nothing about this one.
fn progress(report: &PodReport, netns: &NetnsIdentity) -> Option<String> {
    let same = report
        .netns
        .as_ref()
        .is_some_and(|known| known.is_same_netns(netns));
    if !same {
        return Some("the pod still stands with another netns".to_owned());
    }
    if report.standing == Standing::Enrolled {
        return None;
    }
    Some(match &report.last_error {
        Some(failure) => failure.to_string(),
        None => report.reason.to_owned(),
    })
}

/// Reads the event as Go's `encoding/json` would: names in any case, trailing garbage refused.
fn parse(body: &[u8]) -> Result<AddEvent, CompatError> {
    if body.is_empty() {
        return Err(CompatError::Empty);
    }
    let fields: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(body)?;
    let mut event = AddEvent::default();
    for (key, value) in fields {
        match key.to_ascii_lowercase().as_str() {
            "netns" => event.netns = text(value)?,
            "podname" => event.pod_name = text(value)?,
            "podnamespace" => event.pod_namespace = text(value)?,
            "poduid" => event.pod_uid = text(value)?,
            "ips" => event.ips = addresses(value)?,
            _ => {}
        }
    }
    Ok(event)
}

fn text(value: serde_json::Value) -> Result<String, serde_json::Error> {
    Option::<String>::deserialize(value).map(Option::unwrap_or_default)
}

/// Of each entry only `Address.IP` counts; IPv4-mapped addresses become IPv4.
fn addresses(value: serde_json::Value) -> Result<Vec<IpAddr>, CompatError> {
    let entries = Option::<Vec<serde_json::Map<String, serde_json::Value>>>::deserialize(value)?;
    let field = |map: &serde_json::Map<String, serde_json::Value>, name: &str| {
        map.iter()
            .find(|(key, _)| key.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.clone())
    };
    entries
        .unwrap_or_default()
        .iter()
        .map(|entry| {
            let address = field(entry, "address").and_then(|address| field(address.as_object()?, "ip"));
            let address = address
                .as_ref()
                .and_then(serde_json::Value::as_str)
                .unwrap_or_default();
            address
                .parse::<IpAddr>()
                .map(|address| address.to_canonical())
                .map_err(|_| CompatError::Address(address.chars().take(64).collect()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_of_istios_plugin_is_read() {
        let body = br#"{"Netns":"/var/run/netns/cni-0c0f","PodName":"productpage-v1-abcde","PodNamespace":"bookinfo",
            "IPs":[{"Interface":2,"Address":{"IP":"10.244.0.5","Mask":"////AA=="},"Gateway":"10.244.0.1"},
                   {"Interface":null,"Address":{"IP":"::ffff:10.244.0.6","Mask":""},"Gateway":""}],"Later":1}"#;
        let event = parse(body).unwrap();
        assert_eq!(event.netns, "/var/run/netns/cni-0c0f");
        assert_eq!(
            (event.pod_namespace.as_str(), event.pod_name.as_str()),
            ("bookinfo", "productpage-v1-abcde")
        );
        let expected: Vec<IpAddr> = vec!["10.244.0.5".parse().unwrap(), "10.244.0.6".parse().unwrap()];
        assert_eq!(event.ips, expected);
        assert!(event.pod_uid.is_empty());
    }

    #[test]
    fn only_a_report_of_the_netns_that_was_asked_for_answers_a_request() {
        let netns = |cookie| NetnsIdentity {
            cookie,
            device: 4,
            inode: 1,
            boot_id: "boot".into(),
        };
        let report = PodReport {
            pod: PodRef {
                namespace: "default".parse().unwrap(),
                name: "pod-1".parse().unwrap(),
                uid: "uid-1".parse().unwrap(),
            },
            standing: Standing::Enrolled,
            unprotected: false,
            verdict: String::new(),
            ignored: String::new(),
            reason: "",
            last_error: None,
            netns: Some(netns(7)),
            addresses: Vec::new(),
            timings: Vec::new(),
            acked: None,
            retries: 0,
            rules_version: String::new(),
        };
        assert_eq!(progress(&report, &netns(7)), None);
        // Same device and inode: numbers are used again at once.
        assert!(
            progress(&report, &netns(8)).is_some(),
            "an earlier sandbox answered for a later one"
        );
        let unknown = PodReport {
            netns: None,
            ..report.clone()
        };
        assert!(progress(&unknown, &netns(7)).is_some());
        let pending = PodReport {
            standing: Standing::Pending,
            reason: "no-proxy",
            ..report
        };
        assert_eq!(progress(&pending, &netns(7)).as_deref(), Some("no-proxy"));
    }

    #[test]
    fn field_names_match_in_any_case_and_null_is_nothing() {
        let event =
            parse(br#"{"netns":"/n","PODNAME":"p","podNamespace":null,"ips":null,"PodUID":"u"}"#).unwrap();
        assert_eq!(
            (
                event.netns.as_str(),
                event.pod_name.as_str(),
                event.pod_uid.as_str()
            ),
            ("/n", "p", "u")
        );
        assert!(event.ips.is_empty() && event.pod_namespace.is_empty());
    }

    #[test]
    fn what_is_not_an_event_is_the_callers_fault() {
        for body in [
            "",
            "notjson",
            "{} trailing",
            r#"{"Netns":5}"#,
            r#"{"IPs":[{"Address":{}}]}"#,
            "[]",
        ] {
            let error = parse(body.as_bytes()).unwrap_err();
            assert_eq!(error.status(), StatusCode::BAD_REQUEST, "{body:?}");
        }
    }
}
