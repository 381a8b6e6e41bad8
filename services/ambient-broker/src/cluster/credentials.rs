//! The token for the plugin's degraded decision: of a ServiceAccount of its own that may get pods and namespaces.
//!
//! It is not bound to the agent's pod, because it has to work while that is away, and asks for no audience, which
//! gives it the API server's own. Renewed at half of its life, so that an API server may be down for the other half.
//!
//! The plugin looks no name up: where the API server has one (AKS), it is told the address and, for the certificate, the name.

use std::fmt;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kube::core::params::PostParams;
use kube::core::request::Request;
use serde::Deserialize;
use sluice_proto::pb::node::PluginCredentials;
use tokio::sync::watch;

use super::access::ConnectError;
use super::client::Api;
use super::failure::ApiError;
use super::pause::{Pause, spread};

/// How long a token is asked for; the server may give less.
const LIFE: Duration = Duration::from_hours(24);

/// How old the address of an API server with a name may get.
const NAME_LIFE: Duration = Duration::from_hours(1);

/// The place in troubles.
const PLACE: &str = "serviceaccounts/token";

/// What the plugin may ask the API server with.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Credentials(PluginCredentials);

impl Credentials {
    /// As a message.
    pub(super) fn to_pb(&self) -> PluginCredentials {
        self.0.clone()
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("server", &self.0.server)
            .field("expires_unix", &self.0.expires_unix)
            .finish_non_exhaustive()
    }
}

#[derive(Deserialize)]
struct TokenRequest {
    status: TokenStatus,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct TokenStatus {
    token: String,
    expiration_timestamp: jiff::Timestamp,
}

/// Why there are no credentials.
enum Failed {
    Api(ApiError),
    Authority(ConnectError),
    Name(String, std::io::Error),
}

/// Renews the credentials of `account` (namespace and name), for ever.
pub(super) async fn renew(
    api: Api,
    account: (String, String),
    credentials: watch::Sender<Option<Credentials>>,
) {
    let mut pause = Pause::new(api.timing.retry);
    loop {
        let wait = match request(&api, &account).await {
            Ok(new) => {
                pause.reset();
                api.troubles.over(PLACE);
                let mut wait = until_renewal(new.0.expires_unix, unix_now());
                if !new.0.tls_server_name.is_empty() {
                    wait = wait.min(NAME_LIFE);
                }
                tracing::info!(expires_unix = new.0.expires_unix, "plugin token issued");
                credentials.send_replace(Some(new));
                wait
            }
            Err(Failed::Api(error)) => {
                api.troubles.stand(PLACE, &error);
                pause.next().max(error.wait.unwrap_or_default())
            }
            Err(Failed::Authority(error)) => {
                api.troubles.say(PLACE, sluice_runtime::telemetry::chain(&error));
                pause.next()
            }
            Err(Failed::Name(server, error)) => {
                let problem = format!("cannot look the API server {server} up for the plugin: {error}");
                api.troubles.say(PLACE, problem);
                pause.next()
            }
        };
        tokio::time::sleep(wait).await;
    }
}

async fn request(api: &Api, (namespace, name): &(String, String)) -> Result<Credentials, Failed> {
    let what = "create serviceaccounts/token";
    let body = serde_json::json!({
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": LIFE.as_secs()},
    });
    let accounts = Request::new(format!("/api/v1/namespaces/{namespace}/serviceaccounts"));
    let built = accounts.create_subresource(
        "token",
        name,
        &PostParams::default(),
        body.to_string().into_bytes(),
    );
    let text = api
        .text(what, built, api.timing.call)
        .await
        .map_err(Failed::Api)?;
    // The text is never part of an error: it holds a token.
    let answer: TokenRequest = serde_json::from_str(&text)
        .map_err(|_| Failed::Api(ApiError::unexpected(what, &"the answer is no TokenRequest")))?;
    let (server, tls_server_name) = by_address(&api.server)
        .await
        .map_err(|error| Failed::Name(api.server.clone(), error))?;
    Ok(Credentials(PluginCredentials {
        server,
        tls_server_name,
        ca_pem: api.authority().map_err(Failed::Authority)?,
        token: answer.status.token,
        expires_unix: answer.status.expiration_timestamp.as_second(),
    }))
}

/// A server's URL with an address in it, and the name that was there before.
async fn by_address(server: &str) -> std::io::Result<(String, String)> {
    let Some((scheme, authority)) = server.split_once("://") else {
        return Ok((server.to_owned(), String::new()));
    };
    let Some((name, _)) = authority
        .rsplit_once(':')
        .filter(|_| authority.parse::<SocketAddr>().is_err())
    else {
        return Ok((server.to_owned(), String::new()));
    };
    let found = tokio::net::lookup_host(authority).await?.next();
    let address = found.ok_or_else(|| std::io::Error::other("the name has no address"))?;
    Ok((format!("{scheme}://{address}"), name.to_owned()))
}

/// Half of what is left, less up to an eighth, but never in a tight loop.
fn until_renewal(expires_unix: i64, now_unix: i64) -> Duration {
    let left = u64::try_from(expires_unix.saturating_sub(now_unix)).unwrap_or(0);
    let half = Duration::from_secs(left) / 2;
    let early = spread(half / 4);
    half.saturating_sub(early).max(Duration::from_secs(10))
}

fn unix_now() -> i64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(elapsed.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_renewed_before_half_of_its_life() {
        let hour = Duration::from_hours(1);
        for _ in 0..50 {
            let wait = until_renewal(24 * 3600, 0);
            assert!(wait <= 12 * hour && wait >= 9 * hour, "{wait:?}");
        }
        assert_eq!(until_renewal(0, 5), Duration::from_secs(10));
    }

    #[tokio::test]
    async fn a_name_is_told_beside_its_address() {
        for server in ["https://10.96.0.1:443", "https://[fd00::1]:6443"] {
            let told = by_address(server).await.unwrap();
            assert_eq!(told, (server.to_owned(), String::new()));
        }
        let (server, name) = by_address("https://localhost:6443").await.unwrap();
        assert!(
            ["https://127.0.0.1:6443", "https://[::1]:6443"].contains(&server.as_str()),
            "{server}"
        );
        assert_eq!(name, "localhost");
        by_address("https://no.such.name.invalid:443").await.unwrap_err();
    }

    #[test]
    fn a_token_is_never_shown() {
        let credentials = Credentials(PluginCredentials {
            token: "hush".into(),
            ..PluginCredentials::default()
        });
        assert!(!format!("{credentials:?}").contains("hush"));
    }
}
