//! A stand-in for the API server: real TCP, real TLS, HTTP/1.1, and the answers that a test says.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, KeyUsagePurpose, SanType};
use serde_json::{Value, json};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio_rustls::rustls::{ServerConfig, ServerConnection, StreamOwned};

/// The only token that is accepted. No output of the plugin may contain it.
pub(crate) const TOKEN: &str = "planted-token-4711";

/// The UID of the pod that [`super::run::Run`] adds.
pub(crate) const UID: &str = "11111111-2222-3333-4444-555555555555";

/// What the stand-in does.
#[derive(Debug, Clone)]
pub(crate) enum Answer {
    /// The pod and its namespace.
    Objects { pod: Value, namespace: Value },
    /// This status for pod or namespace, the other one is there.
    Status { of: &'static str, status: u16 },
    /// This body in the place of the pod.
    Body(Vec<u8>),
    /// Elsewhere.
    Redirect(String),
    /// Takes the connection and says nothing, not even TLS.
    Silence,
    /// Takes the request and says nothing.
    Mute,
    /// A byte of the answer every 100 ms.
    Drip,
    /// Half an answer, then the end of the connection.
    Half,
}

/// What the plugin asked.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) path: String,
    pub(crate) head: String,
}

#[derive(Debug)]
pub(crate) struct ApiServer {
    pub(crate) address: SocketAddr,
    authority: String,
    asked: Arc<Mutex<Vec<Asked>>>,
}

/// A certificate authority and the server's certificate for `address` by it.
fn certificates(address: SocketAddr) -> (String, ServerConfig) {
    let mut parameters = CertificateParams::new(Vec::new()).unwrap();
    parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let authority = CertifiedIssuer::self_signed(parameters, KeyPair::generate().unwrap()).unwrap();
    let mut parameters = CertificateParams::new(vec!["kubernetes.default.svc".to_owned()]).unwrap();
    parameters
        .subject_alt_names
        .push(SanType::IpAddress(address.ip()));
    let key = KeyPair::generate().unwrap();
    let certificate = parameters.signed_by(&key, &authority).unwrap();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key)
        .unwrap();
    (authority.pem(), config)
}

/// A pod as the API server has it.
pub(crate) fn pod(labels: &Value, annotations: &Value) -> Value {
    json!({ "kind": "Pod", "metadata": { "name": "web-0", "namespace": "team-a", "uid": UID,
        "labels": labels, "annotations": annotations, "managedFields": [{ "manager": "kubelet" }] } })
}

/// Its namespace.
pub(crate) fn namespace(labels: &Value) -> Value {
    json!({ "kind": "Namespace", "metadata": { "name": "team-a", "uid": "n", "labels": labels } })
}

impl ApiServer {
    pub(crate) fn start(answer: Answer) -> Self {
        Self::start_at("127.0.0.1:0", answer)
    }

    /// Serves until the test's process ends.
    pub(crate) fn start_at(address: &str, answer: Answer) -> Self {
        let listener = TcpListener::bind(address).unwrap();
        let address = listener.local_addr().unwrap();
        let (authority, tls) = certificates(address);
        let tls = Arc::new(tls);
        let asked = Arc::new(Mutex::new(Vec::new()));
        let record = asked.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (tls, answer, record) = (tls.clone(), answer.clone(), record.clone());
                // A client that gives up is no failure of the server's.
                thread::spawn(move || serve(stream?, tls, &answer, &record));
            }
        });
        Self {
            address,
            authority,
            asked,
        }
    }

    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }

    /// A kubeconfig for this server, as the installer writes it.
    pub(crate) fn kubeconfig(&self) -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "local", "cluster": {
                "server": format!("https://{}", self.address),
                "certificate-authority-data": STANDARD.encode(&self.authority) } }],
            "users": [{ "name": "sluice-plugin", "user": { "token": TOKEN } }],
            "contexts": [{ "name": "sluice-plugin@local",
                "context": { "cluster": "local", "user": "sluice-plugin" } }],
            "current-context": "sluice-plugin@local",
        })
    }

    /// Writes it where the plugin looks for it.
    pub(crate) fn write_kubeconfig(&self, run_dir: &Path) {
        write_kubeconfig(run_dir, &self.kubeconfig().to_string());
    }
}

pub(crate) fn write_kubeconfig(run_dir: &Path, text: &str) {
    std::fs::create_dir_all(run_dir.join("plugin")).unwrap();
    std::fs::write(run_dir.join("plugin/kubeconfig"), text).unwrap();
}

fn serve(
    stream: TcpStream,
    tls: Arc<ServerConfig>,
    answer: &Answer,
    record: &Mutex<Vec<Asked>>,
) -> std::io::Result<()> {
    if matches!(answer, Answer::Silence) {
        loop {
            thread::park();
        }
    }
    let mut stream = BufReader::new(StreamOwned::new(ServerConnection::new(tls).unwrap(), stream));
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head)? == 0 {
            return Ok(());
        }
    }
    let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
    let is_pod = path.contains("/pods/");
    let authorized = head
        .to_lowercase()
        .contains(&format!("authorization: bearer {TOKEN}\r\n"));
    record.lock().unwrap().push(Asked { path, head });
    let stream = stream.get_mut();
    if !authorized {
        return reply(stream, 401, "", status(401).to_string().as_bytes());
    }
    match answer {
        Answer::Objects { pod, namespace } => {
            let object = if is_pod { pod } else { namespace };
            reply(stream, 200, "", object.to_string().as_bytes())
        }
        Answer::Status { of, status: number } if (*of == "pod") == is_pod => {
            reply(stream, *number, "", status(*number).to_string().as_bytes())
        }
        Answer::Status { .. } => {
            let object = if is_pod {
                pod(&json!({}), &json!({}))
            } else {
                namespace(&json!({}))
            };
            reply(stream, 200, "", object.to_string().as_bytes())
        }
        Answer::Body(body) => reply(stream, 200, "", body),
        Answer::Redirect(to) => reply(stream, 302, &format!("Location: {to}\r\n"), b""),
        Answer::Half => {
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{\"meta")?;
            stream.flush()
        }
        Answer::Drip => loop {
            stream.write_all(b"H")?;
            stream.flush()?;
            thread::sleep(Duration::from_millis(100));
        },
        Answer::Mute | Answer::Silence => {
            let _ = stream.read(&mut [0]);
            Ok(())
        }
    }
}

/// The API server's way to say no.
fn status(number: u16) -> Value {
    json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": number,
        "message": format!("the server says {number}") })
}

/// Chunked, as the API server sends what it has not measured.
fn reply(stream: &mut impl Write, status: u16, more: &str, body: &[u8]) -> std::io::Result<()> {
    write!(
        stream,
        "HTTP/1.1 {status} Because\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n{more}\r\n"
    )?;
    for chunk in body.chunks(16 * 1024) {
        write!(stream, "{:x}\r\n", chunk.len())?;
        stream.write_all(chunk)?;
        stream.write_all(b"\r\n")?;
    }
    stream.write_all(b"0\r\n\r\n")?;
    stream.flush()
}
