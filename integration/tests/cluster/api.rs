//! Questions to the API server over one kept connection. A kubectl for each would take a core of the two that the
//! cluster has, and what is measured would be the test.

use std::time::Duration;

use anyhow::Context;
use http::Request;
use serde_json::Value;
use tokio::runtime::Runtime;

/// Longest wait for one answer; a server that hangs is an error, and whoever asks asks again.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// A client with the rights of `KUBECONFIG`.
pub(crate) struct Api {
    runtime: Runtime,
    client: kube::Client,
}

impl Api {
    /// Reads `KUBECONFIG`; no request yet.
    pub(crate) fn open() -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let client = runtime.block_on(async {
            let mut config =
                kube::Config::from_kubeconfig(&kube::config::KubeConfigOptions::default()).await?;
            config.connect_timeout = Some(ANSWER_LIMIT);
            config.read_timeout = Some(ANSWER_LIMIT);
            anyhow::Ok(kube::Client::try_from(config)?)
        });
        Ok(Self {
            client: client.context("KUBECONFIG")?,
            runtime,
        })
    }

    /// The object or list at a path, for instance `/api/v1/namespaces/NAME/pods`.
    pub(crate) fn get(&self, path: &str) -> anyhow::Result<Value> {
        self.request(Request::get(path).body(Vec::new())?)
            .with_context(|| format!("GET {path}"))
    }

    /// Creates an object in the collection at a path.
    pub(crate) fn create(&self, path: &str, object: &Value) -> anyhow::Result<()> {
        let request = Request::post(path)
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(object.to_string().into_bytes())?;
        self.request(request)
            .map(drop)
            .with_context(|| format!("POST {path}"))
    }

    /// Deletes the object, or all of the collection, at a path.
    pub(crate) fn delete(&self, path: &str) -> anyhow::Result<()> {
        self.request(Request::delete(path).body(Vec::new())?)
            .map(drop)
            .with_context(|| format!("DELETE {path}"))
    }

    fn request(&self, request: Request<Vec<u8>>) -> anyhow::Result<Value> {
        Ok(self.runtime.block_on(self.client.request(request))?)
    }
}
