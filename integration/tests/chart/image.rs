//! The image: reproducible, and nothing but our static binaries. Needs root and buildah.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::helm::repository;

const BINARIES: [&str; 7] = [
    "ambient-broker",
    "installer",
    "netns-executor",
    "netns-opener",
    "sluice-cni",
    "sluice-cni-removed",
    "sluicectl",
];

fn dist() -> PathBuf {
    let dist = std::env::var_os("SLUICE_BIN_DIR").map(PathBuf::from);
    let dist = dist.unwrap_or_else(|| repository().join("target/dist"));
    assert!(
        dist.join("installer").is_file(),
        "no binaries in {}: run make dist",
        dist.display()
    );
    dist
}

/// Builds the image from the shipped binaries with a target directory of its own.
fn build(target: &Path) -> PathBuf {
    let copies = target.join("dist");
    std::fs::create_dir(&copies).unwrap();
    for binary in BINARIES {
        // Another time stamp and mode than in the other build.
        std::fs::write(copies.join(binary), std::fs::read(dist().join(binary)).unwrap()).unwrap();
    }
    let output = Command::new("make")
        .current_dir(repository())
        // What `make test-cluster` was called with is not meant for this one.
        .env_remove("MAKEFLAGS")
        .env_remove("BUILD")
        .env("CARGO_TARGET_DIR", target)
        .args(["--no-print-directory", "image-archive"])
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    target.join("image/sluice.oci.tar")
}

fn run(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().unwrap();
    assert!(
        output.status.success(),
        "{program}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// Where an archive keeps what a descriptor names.
fn blob(descriptor: &Value) -> String {
    let digest = descriptor["digest"].as_str().unwrap();
    format!("blobs/sha256/{}", digest.strip_prefix("sha256:").unwrap())
}

#[test]
fn two_builds_are_the_same_archive_and_hold_our_binaries_only() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (archive, other) = (build(first.path()), build(second.path()));
    assert!(
        std::fs::read(&archive).unwrap() == std::fs::read(other).unwrap(),
        "two builds differ"
    );

    let archive = archive.display().to_string();
    let json =
        |file: &str| -> Value { serde_json::from_str(&run("tar", &["-xOf", &archive, file])).unwrap() };
    let index = json("index.json");
    let manifest = &index["manifests"][0];
    assert_eq!(
        manifest["annotations"]["org.opencontainers.image.ref.name"],
        "localhost/sluice:dev"
    );
    let manifest = json(&blob(manifest));
    let layers = manifest["layers"].as_array().unwrap();
    assert_eq!(layers.len(), 1, "{layers:?}");
    let config = json(&blob(&manifest["config"]));
    assert_eq!(config["created"], "1970-01-01T00:00:00Z");
    assert!(config["config"]["Entrypoint"].is_null() && config["config"]["Volumes"].is_null());

    let layer = first.path().join("layer");
    let extract = Command::new("tar")
        .args(["-xOf", &archive, &blob(&layers[0])])
        .stdout(std::fs::File::create(&layer).unwrap())
        .status()
        .unwrap();
    assert!(extract.success());
    let list = run("tar", &["-tzvf", layer.to_str().unwrap()]);
    let mut files = Vec::new();
    for line in list.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(fields[1], "0/0", "{line}");
        assert_eq!(fields[3], "1970-01-01", "{line}");
        if fields[0].starts_with('d') {
            assert_eq!(fields[0], "drwxr-xr-x", "{line}");
        } else {
            assert_eq!(fields[0], "-rwxr-xr-x", "{line}");
            files.push(fields[5].to_owned());
        }
    }
    files.sort();
    assert_eq!(files, BINARIES.map(|binary| format!("opt/sluice/bin/{binary}")));
}

#[test]
fn the_binaries_do_not_tell_where_they_were_built() {
    let home = std::env::var_os("HOME").map(|home| Path::new(&home).join(".cargo"));
    let cargo = std::env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or(home)
        .unwrap();
    let places = [repository(), cargo.join("registry")];
    for binary in BINARIES {
        let bytes = std::fs::read(dist().join(binary)).unwrap();
        for place in &places {
            let place = place.as_os_str().as_encoded_bytes();
            let told = bytes.windows(place.len()).any(|window| window == place);
            assert!(!told, "{binary} has {} in it", String::from_utf8_lossy(place));
        }
    }
}

#[test]
fn the_binaries_need_no_library() {
    for binary in BINARIES {
        let path = dist().join(binary).display().to_string();
        // An ELF file without an interpreter is started by the kernel alone.
        let headers = run("readelf", &["--program-headers", &path]);
        assert!(!headers.contains("INTERP"), "{binary}: {headers}");
    }
}
