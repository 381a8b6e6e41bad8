//! What the executor lacks on a node without an opener: the plugin, which may enter namespaces, looks at it in each ADD
//! and hands over what is named ([`RunDir::wanted`]). The file is there only while something is lacking.
//!
//! [`RunDir::wanted`]: crate::paths::RunDir::wanted

use std::io::{self, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::id::{Attachment, NetnsPath};

/// Longest file that is read: some thousand sandboxes.
const MAX_BYTES: u64 = 1 << 20;

/// What is lacking.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wanted {
    /// The host's namespace.
    pub host: bool,
    /// Sandboxes of an earlier life.
    pub sandboxes: Vec<WantedSandbox>,
}

/// A sandbox whose sockets died with an earlier life of the executor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WantedSandbox {
    /// Which one.
    pub attachment: Attachment,
    /// Where its namespace was mounted.
    pub netns_path: NetnsPath,
}

impl Wanted {
    /// Nothing is lacking.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Writes the file in one step, or removes it if nothing is lacking.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        if self.is_empty() {
            return match std::fs::remove_file(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                done => done,
            };
        }
        let temporary = path.with_extension("tmp");
        std::fs::write(&temporary, serde_json::to_vec(self)?)?;
        std::fs::rename(&temporary, path)
    }

    /// Reads the file; without one nothing is lacking.
    pub fn read(path: &Path) -> io::Result<Self> {
        let file = match std::fs::File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            file => file?,
        };
        let mut bytes = Vec::new();
        file.take(MAX_BYTES).read_to_end(&mut bytes)?;
        Ok(serde_json::from_slice(&bytes)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wanted_is_read_back_and_nothing_leaves_no_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("wanted.json");
        assert!(Wanted::read(&path).unwrap().is_empty());
        let wanted = Wanted {
            host: true,
            sandboxes: vec![WantedSandbox {
                attachment: Attachment {
                    network_name: "net".parse().unwrap(),
                    container_id: "c1".parse().unwrap(),
                    ifname: "eth0".parse().unwrap(),
                },
                netns_path: "/run/netns/one".parse().unwrap(),
            }],
        };
        wanted.write(&path).unwrap();
        assert_eq!(Wanted::read(&path).unwrap(), wanted);
        Wanted::default().write(&path).unwrap();
        assert!(!path.exists());
        Wanted::default().write(&path).unwrap();
    }

    #[test]
    fn a_file_that_is_not_ours_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("wanted.json");
        for text in ["", "{}", r#"{"host":true,"sandboxes":[{"netns_path":"/x"}]}"#] {
            std::fs::write(&path, text).unwrap();
            assert!(Wanted::read(&path).is_err(), "{text}");
        }
    }
}
