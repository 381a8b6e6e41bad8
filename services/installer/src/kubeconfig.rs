//! The plugin's credentials as a kubeconfig file.

use std::fmt;
use std::net::SocketAddr;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;
use sluice_proto::pb::node::PluginCredentials;

/// Credentials that the broker gave. Nothing prints the token.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Credentials {
    server: String,
    tls_server_name: String,
    ca_pem: String,
    token: String,
    expires_unix: i64,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("server", &self.server)
            .field("expires_unix", &self.expires_unix)
            .finish_non_exhaustive()
    }
}

/// Credentials that no plugin could use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("credentials: {field} is not {allowed}")]
pub(crate) struct InvalidCredentials {
    field: &'static str,
    allowed: &'static str,
}

impl TryFrom<PluginCredentials> for Credentials {
    type Error = InvalidCredentials;

    fn try_from(message: PluginCredentials) -> Result<Self, InvalidCredentials> {
        let check = |valid: bool, field, allowed| {
            if valid {
                Ok(())
            } else {
                Err(InvalidCredentials { field, allowed })
            }
        };
        let host = message.server.strip_prefix("https://").unwrap_or_default();
        // The plugin looks no name up.
        let address = host.parse::<SocketAddr>().is_ok();
        check(
            address,
            "server",
            "https:// with an IP address (IPv6 in brackets) and a port",
        )?;
        let name = &message.tls_server_name;
        let plain = name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b".-".contains(&byte));
        check(plain, "tls_server_name", "a DNS name")?;
        let pem = message.ca_pem.contains("-----BEGIN CERTIFICATE-----");
        check(pem, "ca_pem", "a PEM certificate")?;
        let token = !message.token.is_empty() && message.token.bytes().all(|byte| byte.is_ascii_graphic());
        check(token, "token", "visible ASCII characters")?;
        Ok(Self {
            server: message.server,
            tls_server_name: message.tls_server_name,
            ca_pem: message.ca_pem,
            token: message.token,
            expires_unix: message.expires_unix,
        })
    }
}

impl Credentials {
    /// Unix time in seconds.
    pub(crate) fn expires_unix(&self) -> i64 {
        self.expires_unix
    }

    /// The file. JSON, which is YAML as well: no reader can take a value for something else.
    pub(crate) fn render(&self) -> Vec<u8> {
        let name = "sluice-plugin";
        let mut cluster = json!({
            "server": self.server,
            "certificate-authority-data": STANDARD.encode(&self.ca_pem),
        });
        if !self.tls_server_name.is_empty() {
            cluster["tls-server-name"] = self.tls_server_name.as_str().into();
        }
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "local", "cluster": cluster}],
            "users": [{"name": name, "user": {"token": self.token}}],
            "contexts": [{"name": name, "context": {"cluster": "local", "user": name}}],
            "current-context": name,
        });
        format!("{config:#}\n").into_bytes()
    }

    /// The file as it may be shown.
    pub(crate) fn render_redacted(&self) -> Vec<u8> {
        let redacted = Self {
            token: "(not shown)".to_owned(),
            ..self.clone()
        };
        redacted.render()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn message() -> PluginCredentials {
        PluginCredentials {
            server: "https://[fd00::1]:443".into(),
            tls_server_name: String::new(),
            ca_pem: "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n".into(),
            token: "header.payload.signature".into(),
            expires_unix: 1_900_000_000,
        }
    }

    #[test]
    fn the_file_names_server_authority_and_token() {
        let file = Credentials::try_from(message()).unwrap().render();
        let file: serde_json::Value = serde_json::from_slice(&file).unwrap();
        assert_eq!(file["apiVersion"], "v1");
        assert_eq!(file["kind"], "Config");
        assert_eq!(file["clusters"][0]["cluster"]["server"], "https://[fd00::1]:443");
        let ca = file["clusters"][0]["cluster"]["certificate-authority-data"]
            .as_str()
            .unwrap();
        assert_eq!(STANDARD.decode(ca).unwrap(), message().ca_pem.as_bytes());
        assert_eq!(file["users"][0]["user"]["token"], "header.payload.signature");
        let context = &file["contexts"][0]["context"];
        assert_eq!(file["current-context"], file["contexts"][0]["name"]);
        assert_eq!(context["cluster"], file["clusters"][0]["name"]);
        assert_eq!(context["user"], file["users"][0]["name"]);
    }

    #[test]
    fn the_name_that_a_certificate_is_checked_for_is_there_if_there_is_one() {
        let cluster = |name: &str| {
            let told = PluginCredentials {
                tls_server_name: name.into(),
                ..message()
            };
            let file = Credentials::try_from(told).unwrap().render();
            let file: serde_json::Value = serde_json::from_slice(&file).unwrap();
            file["clusters"][0]["cluster"].clone()
        };
        assert!(cluster("").get("tls-server-name").is_none());
        assert_eq!(cluster("api.example.net")["tls-server-name"], "api.example.net");
    }

    #[test]
    fn nothing_prints_the_token() {
        let credentials = Credentials::try_from(message()).unwrap();
        assert!(!format!("{credentials:?}").contains("payload"));
        assert!(
            !String::from_utf8(credentials.render_redacted())
                .unwrap()
                .contains("payload")
        );
    }

    #[test]
    fn credentials_that_no_plugin_could_use_are_refused() {
        type Spoil = fn(&mut PluginCredentials);
        let cases: [(&str, Spoil); 6] = [
            ("server", |message| message.server = "http://10.0.0.1".into()),
            ("server", |message| message.server = "https://".into()),
            ("server", |message| {
                message.server = "https://api.example.net:443".into();
            }),
            ("tls_server_name", |message| {
                message.tls_server_name = "a name".into();
            }),
            ("ca_pem", |message| message.ca_pem.clear()),
            ("token", |message| message.token = "two words".into()),
        ];
        for (field, spoil) in cases {
            let mut message = message();
            spoil(&mut message);
            let error = Credentials::try_from(message).unwrap_err();
            assert!(error.to_string().contains(field), "{error}");
        }
    }
}
