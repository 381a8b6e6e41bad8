//! Who owns each address in the host's probe sets: one file an address, so that changing one costs the same
//! however many there are. Nothing leaves because a list came back empty after a restart.

use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;

use sluice_proto::id::PodUid;

use super::{TableError, Unreadable, list, make_directory, remove_file, set_aside, write_whole};

/// The owners on disk and in memory.
#[derive(Debug)]
pub struct ProbeOwners {
    directory: PathBuf,
    owners: BTreeMap<IpAddr, PodUid>,
}

impl ProbeOwners {
    /// Reads what an earlier life wrote.
    pub fn open(directory: impl Into<PathBuf>) -> Result<(Self, Vec<Unreadable>), TableError> {
        let directory = directory.into();
        make_directory(&directory)?;
        let mut owners = BTreeMap::new();
        let mut unreadable = Vec::new();
        for path in list(&directory, "owner")? {
            let address = path
                .file_stem()
                .and_then(|stem| stem.to_str())
                .and_then(|stem| stem.parse::<IpAddr>().ok())
                .ok_or_else(|| "its name is not an address".to_owned());
            let owner = fs::read_to_string(&path)
                .map_err(|error| error.to_string())
                .and_then(|text| PodUid::parse(text).map_err(|error| error.to_string()));
            match address.and_then(|address| Ok((address, owner?))) {
                Ok((address, owner)) => {
                    owners.insert(address, owner);
                }
                Err(reason) => unreadable.push(set_aside(path, reason)),
            }
        }
        Ok((Self { directory, owners }, unreadable))
    }

    /// Records an owner; returns the one it replaces if that is another.
    pub fn set(&mut self, address: IpAddr, owner: &PodUid) -> Result<Option<PodUid>, TableError> {
        if self.owners.get(&address) == Some(owner) {
            return Ok(None);
        }
        write_whole(&self.path_of(address), owner.as_str().as_bytes())?;
        Ok(self.owners.insert(address, owner.clone()))
    }

    /// Forgets an address.
    pub fn remove(&mut self, address: IpAddr) -> Result<(), TableError> {
        self.owners.remove(&address);
        remove_file(&self.path_of(address))
    }

    /// Whose an address is.
    pub fn owner(&self, address: IpAddr) -> Option<&PodUid> {
        self.owners.get(&address)
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (IpAddr, &PodUid)> {
        self.owners.iter().map(|(address, owner)| (*address, owner))
    }

    fn path_of(&self, address: IpAddr) -> PathBuf {
        self.directory.join(format!("{address}.owner"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_survive_a_restart() {
        let directory = tempfile::tempdir().unwrap();
        let (v4, v6): (IpAddr, IpAddr) = ("10.0.0.5".parse().unwrap(), "fd00::5".parse().unwrap());
        let (first, second) = (PodUid::parse("u-1").unwrap(), PodUid::parse("u-2").unwrap());
        let (mut owners, _) = ProbeOwners::open(directory.path()).unwrap();
        assert_eq!(owners.set(v4, &first).unwrap(), None);
        assert_eq!(owners.set(v6, &first).unwrap(), None);
        assert_eq!(owners.set(v4, &second).unwrap(), Some(first.clone()));
        owners.remove(v6).unwrap();
        let (again, unreadable) = ProbeOwners::open(directory.path()).unwrap();
        assert!(unreadable.is_empty());
        assert_eq!(again.iter().collect::<Vec<_>>(), [(v4, &second)]);
    }
}
