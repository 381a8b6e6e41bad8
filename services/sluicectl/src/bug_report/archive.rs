//! The archive: ordinary files below one directory, as every `tar` reads them.

use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path, PathBuf};

use crate::client::AskError;
use crate::render;

/// The directory that everything is below.
const ROOT: &str = "sluice-bug-report";

/// Most that is taken from another archive, in bytes.
const MOST: u64 = 256 << 20;

/// Writes the files to `file`, or to `out` if that is `-`. A file that exists is never written over, and nobody else may
/// read the new one.
pub(crate) fn write(
    file: Option<&Path>,
    entries: &[(String, String)],
    out: &mut impl Write,
) -> Result<(), AskError> {
    if file == Some(Path::new("-")) {
        return append(entries, out).map_err(AskError::Output);
    }
    let default = || PathBuf::from(format!("{ROOT}-{}.tar", render::now_ms() / 1000));
    let path = file.map_or_else(default, Path::to_owned);
    let failed = |source| AskError::File {
        path: path.clone(),
        source,
    };
    let mut archive = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)
        .map_err(failed)?;
    append(entries, &mut archive).map_err(failed)?;
    writeln!(
        out,
        "{}: {} files. Tokens and keys were taken out; names, labels and addresses are in it.",
        path.display(),
        entries.len()
    )
    .map_err(AskError::Output)
}

fn append(entries: &[(String, String)], out: &mut impl Write) -> io::Result<()> {
    let mut archive = tar::Builder::new(out);
    for (name, content) in entries {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(render::now_ms() / 1000);
        archive.append_data(&mut header, Path::new(ROOT).join(name), content.as_bytes())?;
    }
    archive.into_inner()?.flush()
}

/// The ordinary files of an archive that [`write()`] made, without the directory above them. It comes from the node: names
/// that lead elsewhere are left out.
pub(crate) fn read(archive: &[u8]) -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut entries = Vec::new();
    for entry in tar::Archive::new(archive.take(MOST)).entries()? {
        let mut entry = entry?;
        let path = entry.path()?.into_owned();
        let safe = |path: &Path| path.components().all(|part| matches!(part, Component::Normal(_)));
        let Some(name) = path.strip_prefix(ROOT).ok().filter(|path| safe(path)) else {
            continue;
        };
        if entry.header().entry_type().is_file() {
            let name = name.to_string_lossy().into_owned();
            let mut content = Vec::new();
            entry.read_to_end(&mut content)?;
            entries.push((name, content));
        }
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_back() {
        let long = format!("a/{}/b.txt", "x".repeat(150));
        let entries = [
            ("status.txt".to_owned(), "ready\n".to_owned()),
            (long, String::new()),
        ];
        let mut archive = Vec::new();
        write(Some(Path::new("-")), &entries, &mut archive).unwrap();
        let back = read(&archive).unwrap();
        let expected: Vec<_> = entries.map(|(name, text)| (name, text.into_bytes())).into();
        assert_eq!(back, expected);
    }

    #[test]
    fn names_that_lead_elsewhere_are_left_out() {
        let mut builder = tar::Builder::new(Vec::new());
        for name in ["sluice-bug-report/../x", "/etc/passwd", "other/x"] {
            let mut header = tar::Header::new_gnu();
            header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
            header.set_size(0);
            header.set_cksum();
            builder.append(&header, io::empty()).unwrap();
        }
        assert!(read(&builder.into_inner().unwrap()).unwrap().is_empty());
        assert!(read(b"no archive at all").is_err());
    }
}
