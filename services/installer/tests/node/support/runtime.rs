//! The container runtime's way of choosing a configuration.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Value;

/// The configuration that a container runtime uses, as containerd chooses it: the first by name, and an error if that one
/// cannot be loaded.
pub(crate) fn effective(net: &Path) -> Result<(String, Value), String> {
    let mut names: Vec<String> = fs::read_dir(net)
        .map_err(|error| error.to_string())?
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| {
            let extension = name.rsplit_once('.').map(|(_, extension)| extension);
            matches!(extension, Some("conf" | "conflist" | "json"))
        })
        .collect();
    names.sort();
    let name = names.into_iter().next().ok_or("no configuration")?;
    let text = fs::read_to_string(net.join(&name)).map_err(|error| format!("{name}: {error}"))?;
    let value: Value = serde_json::from_str(&text).map_err(|error| format!("{name}: {error}: {text:?}"))?;
    let list = value["plugins"].as_array().is_some_and(|plugins| {
        !plugins.is_empty()
            && plugins
                .iter()
                .all(|plugin| plugin["type"].as_str().is_some_and(|kind| !kind.is_empty()))
    });
    let valid = if name.ends_with(".conflist") {
        list && value["name"].is_string()
    } else {
        value["type"].is_string()
    };
    if valid {
        Ok((name, value))
    } else {
        Err(format!("{name} is not valid: {text}"))
    }
}

pub(crate) fn kinds(list: &Value) -> Vec<String> {
    let plugins = list["plugins"]
        .as_array()
        .cloned()
        .unwrap_or_else(|| vec![list.clone()]);
    plugins
        .iter()
        .map(|plugin| plugin["type"].as_str().unwrap().to_owned())
        .collect()
}

/// A runtime that looks at its configuration every millisecond.
#[derive(Debug)]
pub(crate) struct Reader {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<Seen>>,
}

/// What it saw.
#[derive(Debug, Default)]
struct Seen {
    looks: u64,
    without_ours: u64,
    two_meshes: u64,
    invalid: Vec<String>,
}

impl Reader {
    pub(crate) fn start(net: &Path) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (net, stopped) = (net.to_owned(), stop.clone());
        let thread = std::thread::spawn(move || {
            let mut seen = Seen::default();
            while !stopped.load(Ordering::Relaxed) {
                seen.looks += 1;
                match look(&net) {
                    Ok(list) => {
                        let has = |wanted| kinds(&list).iter().any(|kind| kind == wanted);
                        seen.without_ours += u64::from(!has("sluice-cni"));
                        seen.two_meshes += u64::from(has("sluice-cni") && has("istio-cni"));
                    }
                    Err(error) => seen.invalid.push(error),
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            seen
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }

    fn seen(mut self) -> Seen {
        self.stop.store(true, Ordering::Relaxed);
        let seen = self.thread.take().unwrap().join().unwrap();
        assert!(seen.looks > 0);
        assert!(
            seen.invalid.is_empty(),
            "{} of {} looks: {}",
            seen.invalid.len(),
            seen.looks,
            seen.invalid[0]
        );
        seen
    }

    pub(crate) fn assert_always_valid(self) {
        let seen = self.seen();
        assert_eq!(seen.two_meshes, 0, "of {} looks", seen.looks);
    }

    pub(crate) fn assert_always_ours(self) {
        let seen = self.seen();
        assert_eq!(seen.without_ours, 0, "of {} looks", seen.looks);
    }
}

/// A name that is gone when it is opened was replaced between the two; a runtime looks again because it is told.
fn look(net: &Path) -> Result<Value, String> {
    let mut last = String::new();
    for _ in 0..3 {
        match effective(net) {
            Ok((_, list)) => return Ok(list),
            Err(error) if error.contains("No such file") => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}
