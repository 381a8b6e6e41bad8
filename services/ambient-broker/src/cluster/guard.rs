//! What every request passes: the token, the deadline of the answer's head, and the pause the server asked for.
//!
//! The pause (`Retry-After` of a 429 or 503) counts for all requests, because the server's flow control counts them
//! together too. A request that comes meanwhile is not sent and not held: its sender knows best what to do instead.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http::header::{AUTHORIZATION, HeaderValue, RETRY_AFTER};
use http::{Request, Response, StatusCode};
use tower::{BoxError, Service};

/// A token file is read again after this time; the kubelet renews a projected token long before it expires.
const REREAD: Duration = Duration::from_secs(10);

/// The longest pause a server may ask for.
const LONGEST_PAUSE: Duration = Duration::from_mins(2);

/// Not sent: the server asked to be left alone.
#[derive(Debug, thiserror::Error)]
#[error("the API server asked for a pause")]
pub(super) struct Throttled {
    /// What is left of the pause.
    pub(super) wait: Duration,
}

/// Sent, but no answer began in time.
#[derive(Debug, thiserror::Error)]
#[error("no answer within {:.1} s", after.as_secs_f64())]
pub(super) struct Silent {
    /// The deadline.
    pub(super) after: Duration,
}

/// The token cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum TokenError {
    /// The file cannot be read.
    #[error("cannot read token file {}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// It holds something that is no token. It is not shown.
    #[error("token file {} holds no token", path.display())]
    Malformed {
        /// Which.
        path: PathBuf,
    },
}

/// What all requests share.
pub(super) struct Gate {
    token_file: Option<PathBuf>,
    token: Mutex<Option<(HeaderValue, Instant)>>,
    not_before: Mutex<Option<Instant>>,
    head: Duration,
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gate")
            .field("token_file", &self.token_file)
            .finish_non_exhaustive()
    }
}

impl Gate {
    /// `head`: an answer must begin within this time. Without a token file nothing is added to requests.
    pub(super) fn new(token_file: Option<PathBuf>, head: Duration) -> Arc<Self> {
        Arc::new(Self {
            token_file,
            token: Mutex::default(),
            not_before: Mutex::default(),
            head,
        })
    }

    /// What is left of the pause the server asked for.
    pub(super) fn pause(&self) -> Option<Duration> {
        let until = (*lock(&self.not_before))?;
        let left = until.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }

    fn authorization(&self) -> Result<Option<HeaderValue>, TokenError> {
        let Some(path) = &self.token_file else {
            return Ok(None);
        };
        let mut token = lock(&self.token);
        if let Some((header, read)) = &*token
            && read.elapsed() < REREAD
        {
            return Ok(Some(header.clone()));
        }
        let read = std::fs::read_to_string(path).map_err(|source| TokenError::Read {
            path: path.clone(),
            source,
        });
        match read.and_then(|text| bearer(&text).ok_or(TokenError::Malformed { path: path.clone() })) {
            Ok(header) => {
                *token = Some((header.clone(), Instant::now()));
                Ok(Some(header))
            }
            // A file that is away for a moment is no reason not to ask.
            Err(error) => match &*token {
                Some((header, _)) => Ok(Some(header.clone())),
                None => Err(error),
            },
        }
    }

    fn note<B>(&self, response: &Response<B>) {
        match response.status() {
            StatusCode::UNAUTHORIZED => {
                // The next request reads the file anew.
                if let Some((_, read)) = &mut *lock(&self.token) {
                    *read = read.checked_sub(REREAD).unwrap_or(*read);
                }
            }
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                let seconds = response
                    .headers()
                    .get(RETRY_AFTER)
                    .and_then(|value| value.to_str().ok()?.trim().parse::<u64>().ok());
                if let Some(seconds) = seconds {
                    let pause = Duration::from_secs(seconds).min(LONGEST_PAUSE);
                    *lock(&self.not_before) = Instant::now().checked_add(pause);
                }
            }
            _ => {}
        }
    }
}

fn bearer(token: &str) -> Option<HeaderValue> {
    let token = token.trim();
    let mut header = HeaderValue::from_str(&format!("Bearer {token}")).ok()?;
    header.set_sensitive(true);
    (!token.is_empty()).then_some(header)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Puts the gate before `inner`.
#[derive(Debug, Clone)]
pub(super) struct Guard<S> {
    inner: S,
    gate: Arc<Gate>,
}

impl<S> Guard<S> {
    pub(super) fn new(inner: S, gate: Arc<Gate>) -> Self {
        Self { inner, gate }
    }
}

impl<S, B, R> Service<Request<B>> for Guard<S>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Error: Into<BoxError>,
    S::Future: Send,
    B: Send + 'static,
{
    type Response = Response<R>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        if let Some(wait) = self.gate.pause() {
            return Box::pin(async move { Err(Throttled { wait }.into()) });
        }
        match self.gate.authorization() {
            Ok(Some(header)) => {
                request.headers_mut().insert(AUTHORIZATION, header);
            }
            Ok(None) => {}
            Err(error) => return Box::pin(async move { Err(error.into()) }),
        }
        // The one that was polled ready is the one that is called.
        let unready = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, unready);
        let gate = Arc::clone(&self.gate);
        Box::pin(async move {
            let silent = Silent { after: gate.head };
            let answer = tokio::time::timeout(gate.head, inner.call(request)).await;
            let response = answer.map_err(|_| silent)?.map_err(Into::into)?;
            gate.note(&response);
            Ok(response)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(code: u16, retry_after: Option<&str>) -> Response<()> {
        let mut response = Response::builder().status(code);
        if let Some(value) = retry_after {
            response = response.header(RETRY_AFTER, value);
        }
        response.body(()).unwrap()
    }

    #[test]
    fn a_pause_is_kept_and_bounded() {
        let gate = Gate::new(None, Duration::from_secs(1));
        gate.note(&answer(429, None));
        gate.note(&answer(200, Some("5")));
        gate.note(&answer(429, Some("soon")));
        assert_eq!(gate.pause(), None);
        gate.note(&answer(503, Some("7")));
        let left = gate.pause().unwrap();
        assert!(left > Duration::from_secs(6) && left <= Duration::from_secs(7));
        gate.note(&answer(429, Some("999999")));
        assert!(gate.pause().unwrap() <= LONGEST_PAUSE);
    }

    #[test]
    fn a_refused_token_is_read_again_at_once_and_a_missing_file_keeps_the_last() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        let gate = Gate::new(Some(path.clone()), Duration::from_secs(1));
        assert!(matches!(gate.authorization(), Err(TokenError::Read { .. })));
        std::fs::write(&path, " \n").unwrap();
        assert!(matches!(gate.authorization(), Err(TokenError::Malformed { .. })));
        std::fs::write(&path, "one\n").unwrap();
        assert_eq!(gate.authorization().unwrap().unwrap(), "Bearer one");
        std::fs::write(&path, "two").unwrap();
        assert_eq!(gate.authorization().unwrap().unwrap(), "Bearer one");
        gate.note(&answer(401, None));
        assert_eq!(gate.authorization().unwrap().unwrap(), "Bearer two");
        std::fs::remove_file(&path).unwrap();
        gate.note(&answer(401, None));
        assert_eq!(gate.authorization().unwrap().unwrap(), "Bearer two");
    }

    #[test]
    fn a_token_is_never_shown() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        std::fs::write(&path, "hush").unwrap();
        let gate = Gate::new(Some(path), Duration::from_secs(1));
        let header = gate.authorization().unwrap();
        assert!(!format!("{gate:?} {header:?}").contains("hush"));
    }
}
