use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

const TOKEN: &str = "planted-token";

fn authority() -> String {
    let key = rcgen::KeyPair::generate().unwrap();
    let parameters = rcgen::CertificateParams::new(Vec::new()).unwrap();
    STANDARD.encode(parameters.self_signed(&key).unwrap().pem())
}

fn kubeconfig() -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "preferences": {},
        "clusters": [{ "name": "local", "cluster": {
            "server": "https://10.0.0.1:6443", "certificate-authority-data": authority() } }],
        "users": [
            { "name": "other", "user": { "client-key-data": "x" } },
            { "name": "sluice-plugin", "user": { "token": TOKEN } },
        ],
        "contexts": [{ "name": "c", "context": { "cluster": "local", "user": "sluice-plugin" } }],
        "current-context": "c",
    })
}

fn read(text: &str) -> Result<Credentials, String> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    Credentials::read(file.path()).map_err(|error| error.to_string())
}

#[test]
fn the_current_context_says_which_server_and_which_token() {
    let credentials = read(&kubeconfig().to_string()).ok().unwrap();
    assert_eq!(credentials.server.to_string(), "10.0.0.1:6443");
    assert_eq!(credentials.roots.len(), 1);
    assert_eq!(credentials.bearer, "Bearer planted-token");
    assert!(credentials.bearer.is_sensitive());
}

#[test]
fn a_server_is_an_address_with_or_without_port() {
    for (server, expected) in [
        ("https://10.0.0.1", Some("10.0.0.1:443")),
        ("https://10.0.0.1/", Some("10.0.0.1:443")),
        ("https://[fd00::1]", Some("[fd00::1]:443")),
        ("https://[fd00::1]:6443", Some("[fd00::1]:6443")),
        ("http://10.0.0.1", None),
        ("https://fd00::1", None),
        ("https://kubernetes.default:443", None),
        ("https://10.0.0.1/prefix", None),
        ("https://user@10.0.0.1", None),
        ("", None),
    ] {
        let parsed = parse_server(server).map(|address| address.to_string());
        assert_eq!(parsed.as_deref(), expected, "{server}");
    }
}

#[test]
fn what_cannot_be_used_is_named_and_never_shown() {
    let broken = |change: fn(&mut Value)| {
        let mut value = kubeconfig();
        change(&mut value);
        read(&value.to_string()).err().unwrap()
    };
    for (error, named) in [
        (broken(|v| v["current-context"] = json!("x")), "current-context"),
        (broken(|v| v["users"] = json!([])), "names no user"),
        (broken(|v| v["users"][1]["user"] = json!({})), "token is missing"),
        (
            broken(|v| v["users"][1]["user"]["token"] = json!("planted-token\n")),
            "line break",
        ),
        // In the place of a structure, where a parser would quote it.
        (broken(|v| v["users"] = json!(TOKEN)), "line 1, column"),
        (
            broken(|v| v["clusters"][0]["cluster"]["insecure-skip-tls-verify"] = json!(true)),
            "insecure",
        ),
        (
            broken(|v| v["clusters"][0]["cluster"]["server"] = json!("https://api.example")),
            "server must be",
        ),
        (
            broken(|v| v["clusters"][0]["cluster"]["certificate-authority-data"] = json!("!")),
            "base64",
        ),
        (
            broken(|v| v["clusters"][0]["cluster"]["certificate-authority-data"] = json!("")),
            "no certificate",
        ),
        (
            read("apiVersion: v1\nusers:\n- user:\n    token: planted-token\n")
                .err()
                .unwrap(),
            "in JSON",
        ),
        (read("").err().unwrap(), "in JSON"),
        (read(&" ".repeat(70_000)).err().unwrap(), "at most 65536 bytes"),
    ] {
        assert!(error.contains(named), "{named}: {error}");
        assert!(!error.contains(TOKEN), "{error}");
    }
}

#[test]
fn what_is_no_file_is_refused_without_waiting() {
    let directory = tempfile::tempdir().unwrap();
    let fifo = directory.path().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRUSR).unwrap();
    for path in [fifo.as_path(), directory.path()] {
        assert!(matches!(
            Credentials::read(path),
            Err(KubeconfigError::File { .. })
        ));
    }
    let missing = Credentials::read(&directory.path().join("none"));
    assert!(matches!(missing, Err(KubeconfigError::Missing)));
}

#[test]
fn a_bundle_may_hold_a_certificate_that_cannot_be_used() {
    let strange = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let usable = String::from_utf8(STANDARD.decode(authority()).unwrap()).unwrap();
    let roots = |pem: String| parse_roots(&STANDARD.encode(pem)).map(|roots| roots.len());
    assert_eq!(roots(format!("{strange}{usable}{usable}")), Ok(2));
    assert!(roots(strange.to_owned()).is_err());
}

proptest! {
    #[test]
    fn no_file_makes_a_panic_or_shows_its_content(text in any::<Vec<u8>>(), at in 0..200_usize) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut whole = kubeconfig().to_string().into_bytes();
        let at = at.min(whole.len());
        whole.splice(at..at, text);
        std::fs::write(file.path(), whole).unwrap();
        if let Err(error) = Credentials::read(file.path()) {
            prop_assert!(!error.to_string().contains(TOKEN));
        }
    }

    #[test]
    fn whatever_is_taken_for_a_server_is_an_address(text in "(https?://)?[0-9a-f:.\\[\\]@/]{0,24}") {
        if let Some(address) = parse_server(&text) {
            prop_assert!(text.starts_with("https://") && text.contains(&address.ip().to_string()[..1]));
        }
    }
}
