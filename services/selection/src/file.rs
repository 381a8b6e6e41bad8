//! The selection file that an operator gives to broker and installer: the configuration as YAML.

use std::io;
use std::path::{Path, PathBuf};

use crate::SelectionConfig;

/// A selection file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SelectionFileError {
    /// It cannot be read.
    #[error("cannot read selection file {}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is not valid.
    #[error("selection file {} is not valid: {problem}", path.display())]
    Invalid {
        /// Which.
        path: PathBuf,
        /// What is wrong, with line and field.
        problem: String,
    },
}

/// The configuration in the selection file at `path`, given what came of reading it. A file without settings leaves
/// the defaults.
pub fn parse_selection_file(
    path: &Path,
    text: io::Result<String>,
) -> Result<SelectionConfig, SelectionFileError> {
    let text = text.map_err(|source| SelectionFileError::Read {
        path: path.to_owned(),
        source,
    })?;
    // An empty document is null in YAML, not a configuration without settings.
    if text
        .lines()
        .all(|line| line.trim().is_empty() || line.trim_start().starts_with('#'))
    {
        return Ok(SelectionConfig::default());
    }
    serde_saphyr::from_str(&text).map_err(|error| SelectionFileError::Invalid {
        path: path.to_owned(),
        problem: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<SelectionConfig, SelectionFileError> {
        parse_selection_file(Path::new("/etc/sluice/selection.yaml"), Ok(text.to_owned()))
    }

    #[test]
    fn a_bad_selection_names_file_and_place() {
        let error = parse("dnsCapture: true\nexcludedNamespaces: 5\n")
            .unwrap_err()
            .to_string();
        assert!(error.contains("selection.yaml") && error.contains('2'), "{error}");
        let config = parse("excludedNamespaces: [a, b]\nipv6: false\n").unwrap();
        assert!(!config.ipv6 && config.excludes("a"));
        assert_eq!(parse("# nothing\n").unwrap(), SelectionConfig::default());
    }
}
