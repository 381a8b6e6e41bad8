//! Another program that owns an nftables table (`NFT_TABLE_F_OWNER`, linux/netfilter/nf_tables.h): while it lives, the
//! kernel refuses everybody else's changes to that table.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::stat::Mode;
use sluice_testkit::netns::{Netns, Place};
use sluice_testkit::process::{Process, Spawn, text};
use sluice_testkit::wait::poll_true;

const SOON: Duration = Duration::from_secs(10);

/// A table of a foreign owner; gone when dropped.
#[derive(Debug)]
pub struct OwnedTable {
    _nft: Process,
    _input: File,
    fifo: PathBuf,
}

impl OwnedTable {
    /// Takes the place of table `family name` in `netns`. `dir` is for a FIFO.
    pub fn take(netns: &Netns, family: &str, name: &str, dir: &Path) -> anyhow::Result<Self> {
        let fifo = dir.join(format!("nft-{name}-{}", netns.inode()));
        nix::unistd::mkfifo(&fifo, Mode::S_IRUSR | Mode::S_IWUSR)?;
        let place = Place::from(netns);
        let nft = Spawn::program("nft", "/bin/sh")
            .args(["-c", "exec nft -i < \"$1\"", "sh"])
            .arg(&fifo)
            .place(place.clone())
            .start()?;
        // Both ends, so that opening never waits for the other side.
        let mut input = File::options().read(true).write(true).open(&fifo)?;
        let table = format!("{family} {name}");
        // The first line makes sure that there is one to delete; all three are one transaction.
        writeln!(
            input,
            "add table {table}; delete table {table}; add table {table} {{ flags owner; }}"
        )?;
        poll_true("the table has a foreign owner", SOON, || {
            text(&place, "nft", &["list", "table", family, name], b"")
                .is_ok_and(|listing| listing.contains("owner"))
        })?;
        Ok(Self {
            _nft: nft,
            _input: input,
            fifo,
        })
    }
}

impl Drop for OwnedTable {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.fifo);
    }
}
