//! Rules of the repository that no compiler checks. Needs nothing.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::path::{Path, PathBuf};

/// Longest source file, in lines (CONTRIBUTING.md).
const LONGEST_FILE: usize = 400;
/// Longest `main.rs`, in lines.
const LONGEST_MAIN: usize = 100;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn files(directory: &Path, suffix: &str, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap().map(Result::unwrap) {
        let (path, name) = (entry.path(), entry.file_name().into_string().unwrap());
        if entry.file_type().unwrap().is_dir() {
            if name != "target" && !name.starts_with('.') {
                files(&path, suffix, found);
            }
        } else if name.ends_with(suffix) {
            found.push(path);
        }
    }
}

fn all(suffix: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    files(&root(), suffix, &mut found);
    assert!(!found.is_empty(), "{suffix}");
    found
}

#[test]
fn every_crate_inherits_the_lints() {
    for manifest in all("Cargo.toml") {
        let text = std::fs::read_to_string(&manifest).unwrap();
        let inherits = text.contains("[workspace]") || text.contains("[lints]\nworkspace = true");
        assert!(
            inherits,
            "{} does not inherit the workspace's lints",
            manifest.display()
        );
    }
}

#[test]
fn every_crate_takes_its_dependencies_from_the_workspace() {
    for manifest in all("Cargo.toml") {
        let text = std::fs::read_to_string(&manifest).unwrap();
        if text.contains("[workspace]") {
            continue;
        }
        let sections = text
            .split("\n[")
            .filter(|section| section.lines().next().unwrap().contains("dependencies]"));
        for line in sections.flat_map(|section| section.lines().skip(1)) {
            let inherits = line.is_empty() || line.starts_with('#') || line.contains("workspace = true");
            assert!(
                inherits,
                "{}: {line:?} names a version of its own",
                manifest.display()
            );
        }
    }
}

#[test]
fn no_source_file_is_a_book() {
    for source in all(".rs") {
        let lines = std::fs::read_to_string(&source).unwrap().lines().count();
        let limit = if source.ends_with("src/main.rs") {
            LONGEST_MAIN
        } else {
            LONGEST_FILE
        };
        assert!(
            lines <= limit,
            "{} has {lines} lines; at most {limit}",
            source.display()
        );
    }
}

#[test]
fn every_ignored_test_says_what_it_needs() {
    for source in all(".rs") {
        let text = std::fs::read_to_string(&source).unwrap();
        let bare = text.lines().any(|line| line.trim() == concat!("#[", "ignore]"));
        assert!(!bare, "{} ignores a test without a reason", source.display());
    }
}

#[test]
fn every_error_code_is_documented_for_operators() {
    let text = std::fs::read_to_string(root().join("plugin/README.md")).unwrap();
    for (code, fix) in sluice_proto::code::ErrorCode::all() {
        let documented = text
            .lines()
            .any(|line| line.starts_with(&format!("| `{code}` |")) && line.contains(fix));
        assert!(documented, "plugin/README.md lacks {code} or its fix");
    }
}
