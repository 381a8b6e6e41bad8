//! Log lines reach the installer's socket when somebody listens, and cost nothing when nobody does.

use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use crate::{add, node, outside, passed};

fn listen(run_dir: &Path) -> UnixDatagram {
    let socket = UnixDatagram::bind(run_dir.join("plugin/log.sock")).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    socket
}

#[test]
fn what_stderr_gets_the_installer_gets_too() {
    let (run_dir, _api) = node(outside());
    let socket = listen(run_dir.path());
    let done = add(run_dir.path()).go();
    passed(&done);
    let mut buffer = [0; 16 * 1024];
    let length = socket.recv(&mut buffer).unwrap();
    assert_eq!(
        std::str::from_utf8(&buffer[..length]).unwrap(),
        done.stderr.trim_end()
    );
    let line: Value = serde_json::from_slice(&buffer[..length]).unwrap();
    for (key, value) in [
        ("level", "warn"),
        ("service", "sluice-cni"),
        ("message", "agent away, the API server decided"),
        ("pod", "team-a/web-0"),
        ("container_id", "c0ffee"),
        ("verdict", "outside"),
    ] {
        assert_eq!(line[key], value, "{line}");
    }
    assert!(line["agent"].as_str().unwrap().contains("ENOENT"), "{line}");
}

#[test]
fn a_socket_that_nobody_empties_delays_nothing() {
    let (run_dir, _api) = node(outside());
    let socket = listen(run_dir.path());
    let filler = UnixDatagram::unbound().unwrap();
    filler.set_nonblocking(true).unwrap();
    while filler
        .send_to(&[0; 1024], run_dir.path().join("plugin/log.sock"))
        .is_ok()
    {}
    let done = add(run_dir.path()).go();
    passed(&done);
    assert!(done.elapsed < Duration::from_secs(3), "{done:?}");
    drop(socket);
    // Now nobody listens where a file still is.
    passed(&add(run_dir.path()).go());
}
