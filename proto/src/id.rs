//! Ids, names and paths that cross a process boundary: validated where they enter, then never again.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A value from outside that is not of the required form.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} {value:?} is not valid: {allowed}")]
pub struct InvalidId {
    /// Which kind of value.
    pub what: &'static str,
    /// The value, cut to 64 characters.
    pub value: String,
    /// What is allowed.
    pub allowed: &'static str,
}

impl InvalidId {
    fn new(what: &'static str, value: &str, allowed: &'static str) -> Self {
        Self {
            what,
            value: value.chars().take(64).collect(),
            allowed,
        }
    }
}

macro_rules! id_type {
    ($(#[$doc:meta])* $name:ident, $what:literal, $allowed:literal, $valid:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// What a valid value looks like, for messages to people.
            pub const ALLOWED: &str = $allowed;

            /// Checks and wraps a value.
            pub fn parse(value: impl Into<String>) -> Result<Self, InvalidId> {
                let value = value.into();
                let valid: fn(&str) -> bool = $valid;
                if valid(&value) { Ok(Self(value)) } else { Err(InvalidId::new($what, &value, $allowed)) }
            }

            /// The value as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidId;
            fn try_from(value: String) -> Result<Self, InvalidId> {
                Self::parse(value)
            }
        }

        impl std::str::FromStr for $name {
            type Err = InvalidId;
            fn from_str(value: &str) -> Result<Self, InvalidId> {
                Self::parse(value)
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }
    };
}

fn cni_name(s: &str) -> bool {
    let mut bytes = s.bytes();
    s.len() <= 253
        && bytes.next().is_some_and(|b| b.is_ascii_alphanumeric())
        && bytes.all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-'))
}

fn interface_name(s: &str) -> bool {
    (1..=15).contains(&s.len())
        && s != "."
        && s != ".."
        && !s.starts_with('!')
        && s.bytes()
            .all(|b| b.is_ascii_graphic() && !br#"/:'"`;#{}\$,*+"#.contains(&b))
}

fn dns_label(s: &str) -> bool {
    (1..=63).contains(&s.len())
        && s.bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        && !s.starts_with('-')
        && !s.ends_with('-')
}

fn dns_subdomain(s: &str) -> bool {
    (1..=253).contains(&s.len()) && s.split('.').all(dns_label)
}

fn pod_uid(s: &str) -> bool {
    (1..=64).contains(&s.len()) && s.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}

fn netns_path(s: &str) -> bool {
    s.len() <= 255
        && s.starts_with('/')
        && s.bytes().all(|b| b.is_ascii_graphic())
        && !s.split('/').any(|part| part == ".." || part == ".")
}

id_type!(
    /// `CNI_CONTAINERID` (CNI spec section 2): names the sandbox.
    ContainerId, "container id", "a letter or digit, then letters, digits, '_', '.', '-'; at most 253 characters", cni_name
);
id_type!(
    /// Name of a network configuration list (CNI spec section 1).
    NetworkName, "network name", "a letter or digit, then letters, digits, '_', '.', '-'; at most 253 characters", cni_name
);
id_type!(
    /// Name of a network interface (`IFNAMSIZ`, linux/if.h), without characters that mean something to a shell or to nft.
    InterfaceName, "interface name", "1 to 15 visible ASCII characters, none of / : ' \" ` ; # { } \\ $ , * + and no leading !", interface_name
);
impl Default for InterfaceName {
    /// What container runtimes call the first interface of a sandbox.
    fn default() -> Self {
        Self("eth0".to_owned())
    }
}

id_type!(
    /// A Kubernetes namespace (RFC 1123 label).
    Namespace, "namespace", "1 to 63 lower-case letters, digits and '-', not at the ends", dns_label
);
id_type!(
    /// A pod's name (RFC 1123 subdomain).
    PodName, "pod name", "RFC 1123 labels joined by '.', at most 253 characters", dns_subdomain
);
id_type!(
    /// A pod's `metadata.uid`, or for a static pod the hash that the kubelet uses in its place.
    PodUid, "pod uid", "1 to 64 letters, digits and '-'", pod_uid
);
id_type!(
    /// Where the runtime mounted a network namespace, on the host.
    NetnsPath, "netns path", "an absolute path of visible ASCII characters without '.' and '..', at most 255 bytes", netns_path
);

/// Key of a sandbox's attachment: one interface of one sandbox in one network (CNI spec section 2).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Attachment {
    /// The network configuration list's name.
    pub network_name: NetworkName,
    /// The sandbox.
    pub container_id: ContainerId,
    /// The interface inside the sandbox.
    pub ifname: InterfaceName,
}

impl fmt::Display for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.network_name, self.container_id, self.ifname)
    }
}

/// A pod, as the runtime and Kubernetes both name it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PodRef {
    /// Its Kubernetes namespace.
    pub namespace: Namespace,
    /// Its name.
    pub name: PodName,
    /// Its UID.
    pub uid: PodUid,
}

impl fmt::Display for PodRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interface_names_that_could_carry_a_command_are_refused() {
        for bad in [
            "",
            "a b",
            "eth0;flush",
            "x\"",
            "!eth0",
            "eth0#",
            "a/b",
            "sixteen-chars-xx",
            "{",
            "..",
            "a\n",
            "eth0,",
            "ä",
        ] {
            assert!(InterfaceName::parse(bad).is_err(), "{bad:?}");
        }
        for good in ["eth0", "fake1s0f0", "tailscale0", "br-1234", "en0.100", "0abc"] {
            assert!(InterfaceName::parse(good).is_ok(), "{good:?}");
        }
    }

    #[test]
    fn paths_that_climb_are_refused() {
        assert!(NetnsPath::parse("/var/run/netns/cni-1").is_ok());
        assert!(NetnsPath::parse("/proc/12/ns/net").is_ok());
        for bad in [
            "",
            "run/netns/x",
            "/run/netns/../../etc/passwd",
            "/run/./x",
            "/run/a b",
        ] {
            assert!(NetnsPath::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn an_error_says_what_was_given_and_what_is_allowed() {
        let error = PodUid::parse("no spaces").unwrap_err().to_string();
        assert_eq!(
            error,
            "pod uid \"no spaces\" is not valid: 1 to 64 letters, digits and '-'"
        );
    }
}
