//! The transports over real sockets: descriptors arrive, wrong peers and wrong bytes do not get through.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::time::{Duration, Instant};

use sluice_proto::transport::descriptors::{MAX_DESCRIPTORS, TransportError};
use sluice_proto::transport::kept::{KeptListener, LOOK};
use sluice_proto::transport::preamble::{self, PREAMBLE_DEADLINE, PreambleStream};
use sluice_proto::transport::seqpacket::{MAX_MESSAGE, SeqpacketConnection, SeqpacketListener};
use sluice_proto::transport::uds::{Peer, PeerPolicy, bind_stream, check_free};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

fn file_with(text: &str) -> std::fs::File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file.rewind().unwrap();
    file
}

fn inode(fd: impl AsFd) -> u64 {
    std::fs::File::from(fd.as_fd().try_clone_to_owned().unwrap())
        .metadata()
        .unwrap()
        .ino()
}

#[tokio::test]
async fn descriptors_arrive_before_the_first_byte_of_the_stream() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s.sock");
    let listener = bind_stream(&path, 0o600, None).unwrap();
    let file = file_with("handed over");
    let expected = inode(&file);
    let client = std::thread::spawn(move || {
        let mut stream = preamble::connect(&path, &[file.as_fd()], Duration::from_secs(1)).unwrap();
        stream.write_all(b"PRI rest").unwrap();
        stream
    });
    let (stream, _) = listener.accept().await.unwrap();
    let mut stream = PreambleStream::accept(stream).await.unwrap();
    assert_eq!(stream.connection().peer.uid, nix::unistd::getuid().as_raw());
    let descriptors = stream.connection().take_descriptors();
    assert_eq!(descriptors.len(), 1);
    assert_eq!(inode(&descriptors[0]), expected);
    let mut text = String::new();
    std::fs::File::from(descriptors.into_iter().next().unwrap())
        .read_to_string(&mut text)
        .unwrap();
    assert_eq!(text, "handed over");
    assert!(stream.connection().take_descriptors().is_empty());
    let mut rest = [0; 8];
    stream.read_exact(&mut rest).await.unwrap();
    assert_eq!(&rest, b"PRI rest");
    drop(client.join().unwrap());
}

#[tokio::test]
async fn a_plain_http2_client_needs_no_descriptors() {
    let (mut client, server) = tokio::net::UnixStream::pair().unwrap();
    client.write_all(b"PRI").await.unwrap();
    let stream = PreambleStream::accept(server).await.unwrap();
    assert!(stream.connection().take_descriptors().is_empty());
}

#[tokio::test]
async fn garbage_a_closed_and_a_silent_peer_are_refused() {
    let (mut client, server) = tokio::net::UnixStream::pair().unwrap();
    client.write_all(b"GET / HTTP/1.1").await.unwrap();
    let refused = PreambleStream::accept(server).await.unwrap_err();
    assert!(matches!(refused, TransportError::Malformed(_)), "{refused}");

    let (client, server) = tokio::net::UnixStream::pair().unwrap();
    drop(client);
    assert!(matches!(
        PreambleStream::accept(server).await,
        Err(TransportError::Closed)
    ));

    let (_silent, server) = tokio::net::UnixStream::pair().unwrap();
    let started = Instant::now();
    assert!(matches!(
        PreambleStream::accept(server).await,
        Err(TransportError::Deadline(_))
    ));
    assert!(started.elapsed() < PREAMBLE_DEADLINE * 3);
}

#[tokio::test]
async fn connecting_waits_for_a_listener_that_comes_late_and_gives_up_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("late.sock");
    let late = path.clone();
    let client = std::thread::spawn(move || preamble::connect(&late, &[], Duration::from_secs(5)).map(drop));
    // The client is refused at least once before this.
    tokio::time::sleep(Duration::from_millis(60)).await;
    let listener = bind_stream(&path, 0o600, None).unwrap();
    listener.accept().await.unwrap();
    client.join().unwrap().unwrap();

    let started = Instant::now();
    let nobody = dir.path().join("nobody.sock");
    assert!(preamble::connect(&nobody, &[], Duration::from_millis(200)).is_err());
    assert!(started.elapsed() < Duration::from_secs(2));
}

#[tokio::test]
async fn a_full_backlog_is_waited_out_up_to_the_deadline() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("full.sock");
    let socket = nix::sys::socket::socket(
        nix::sys::socket::AddressFamily::Unix,
        nix::sys::socket::SockType::Stream,
        nix::sys::socket::SockFlag::empty(),
        None,
    )
    .unwrap();
    nix::sys::socket::bind(
        socket.as_raw_fd(),
        &nix::sys::socket::UnixAddr::new(&path).unwrap(),
    )
    .unwrap();
    nix::sys::socket::listen(&socket, nix::sys::socket::Backlog::new(0).unwrap()).unwrap();
    let blocked = std::thread::spawn(move || {
        let mut held = Vec::new();
        let started = Instant::now();
        while let Ok(stream) = preamble::connect(&path, &[], Duration::from_millis(300)) {
            held.push(stream);
            assert!(held.len() < 10, "the backlog never filled");
        }
        started.elapsed()
    });
    let waited = blocked.join().unwrap();
    assert!(
        waited >= Duration::from_millis(250) && waited < Duration::from_secs(3),
        "{waited:?}"
    );
}

#[tokio::test]
async fn a_packet_and_its_descriptor_arrive_together() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("q.sock");
    let listener = SeqpacketListener::bind(&path, 0o660, None).unwrap();
    let client = SeqpacketConnection::connect(&path).unwrap();
    let server = listener.accept().await.unwrap();
    assert_eq!(server.peer().uid, nix::unistd::getuid().as_raw());
    let file = file_with("x");
    client.send(b"add", &[file.as_fd()]).await.unwrap();
    client.send(b"del", &[]).await.unwrap();
    let first = server.receive(1).await.unwrap();
    assert_eq!(
        (first.bytes.as_slice(), first.descriptors.len()),
        (&b"add"[..], 1)
    );
    assert_eq!(inode(&first.descriptors[0]), inode(&file));
    let second = server.receive(0).await.unwrap();
    assert_eq!(
        (second.bytes.as_slice(), second.descriptors.len()),
        (&b"del"[..], 0)
    );
    drop(client);
    assert!(matches!(server.receive(0).await, Err(TransportError::Closed)));
}

#[tokio::test]
async fn surplus_descriptors_and_long_packets_are_refused_and_nothing_leaks() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("q.sock");
    let listener = SeqpacketListener::bind(&path, 0o660, None).unwrap();
    let client = SeqpacketConnection::connect(&path).unwrap();
    let server = listener.accept().await.unwrap();
    let file = file_with("x");
    let before = std::fs::read_dir("/proc/self/fd").unwrap().count();
    client.send(b"two", &[file.as_fd(), file.as_fd()]).await.unwrap();
    let refused = server.receive(1).await.unwrap_err();
    assert!(
        matches!(refused, TransportError::TooManyDescriptors { got: 2, limit: 1 }),
        "{refused}"
    );
    let many = vec![file.as_fd(); MAX_DESCRIPTORS + 1];
    assert!(matches!(
        client.send(b"many", &many).await,
        Err(TransportError::TooManyDescriptors { .. })
    ));
    assert!(matches!(
        client.send(&vec![0; MAX_MESSAGE + 1], &[]).await,
        Err(TransportError::TooLong { .. })
    ));
    assert!(matches!(
        client.send(b"", &[]).await,
        Err(TransportError::TooLong { .. })
    ));
    assert_eq!(std::fs::read_dir("/proc/self/fd").unwrap().count(), before);
}

#[tokio::test]
async fn a_full_socket_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("q.sock");
    let listener = SeqpacketListener::bind(&path, 0o660, None).unwrap();
    let client = SeqpacketConnection::connect(&path).unwrap();
    let server = listener.accept().await.unwrap();
    let sender = tokio::spawn(async move {
        for _ in 0..5_000 {
            client.send(&[7; 512], &[]).await.unwrap();
        }
    });
    for _ in 0..5_000 {
        assert_eq!(server.receive(0).await.unwrap().bytes.len(), 512);
    }
    sender.await.unwrap();
}

#[tokio::test]
async fn a_socket_replaces_what_was_at_its_path_and_has_its_mode() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s.sock");
    std::fs::write(&path, "stale").unwrap();
    let _first = bind_stream(&path, 0o600, None).unwrap();
    let _second = bind_stream(&path, 0o660, None).unwrap();
    let metadata = std::fs::metadata(&path).unwrap();
    assert!(metadata.file_type().is_socket());
    assert_eq!(metadata.mode() & 0o777, 0o660);
    assert_eq!(
        std::fs::read_dir(dir.path()).unwrap().count(),
        1,
        "no temporary name is left"
    );
    let error = bind_stream(&dir.path().join("absent/s.sock"), 0o600, None)
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("cannot bind socket ") && error.contains("absent/s.sock"),
        "{error}"
    );
}

#[tokio::test]
async fn a_socket_whose_file_is_removed_is_made_again_and_one_that_was_taken_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s.sock");
    let mut kept = KeptListener::bind(&path, 0o640).unwrap();
    let (accepted, connected) = tokio::join!(kept.accept(), UnixStream::connect(&path));
    let _pair = (accepted.unwrap(), connected.unwrap());

    std::fs::remove_file(&path).unwrap();
    let finds_it = async {
        loop {
            match UnixStream::connect(&path).await {
                Ok(stream) => return stream,
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    };
    let both = async { tokio::join!(kept.accept(), finds_it) };
    let (accepted, _) = tokio::time::timeout(Duration::from_secs(10), both).await.unwrap();
    accepted.unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o640);

    let another = bind_stream(&path, 0o600, None).unwrap();
    let left_alone = tokio::time::timeout(2 * LOOK, kept.accept()).await;
    assert!(left_alone.is_err(), "who came?");
    let (reached, _) = tokio::join!(another.accept(), UnixStream::connect(&path));
    reached.unwrap();
}

#[test]
fn only_listed_uids_are_served() {
    let policy = PeerPolicy::uids([0, 7]);
    assert!(
        policy
            .check(Peer {
                uid: 7,
                gid: 1,
                pid: 2
            })
            .is_ok()
    );
    let refused = policy
        .check(Peer {
            uid: 8,
            gid: 0,
            pid: 2,
        })
        .unwrap_err()
        .to_string();
    assert_eq!(
        refused,
        "peer with uid 8 (pid 2) is refused: allowed are the uids [0, 7]"
    );
}

#[tokio::test]
async fn a_path_is_free_exactly_while_nobody_listens_there() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let found = |name: &str| {
        let error = check_free(&path(name)).unwrap_err();
        assert_eq!(error.source.kind(), std::io::ErrorKind::AddrInUse);
        format!("{error}: {}", error.source)
    };
    check_free(&path("nothing")).unwrap();
    std::fs::write(path("file"), "").unwrap();
    check_free(&path("file")).unwrap();
    let stream = bind_stream(&path("stream"), 0o600, None).unwrap();
    let packets = SeqpacketListener::bind(&path("packets"), 0o600, None).unwrap();
    let datagrams = std::os::unix::net::UnixDatagram::bind(path("datagrams")).unwrap();
    let us = format!(
        "process {} (uid {}) listens there",
        std::process::id(),
        nix::unistd::getuid()
    );
    for name in ["stream", "packets"] {
        let text = found(name);
        assert!(
            text.contains(&us) && text.contains(&*path(name).to_string_lossy()),
            "{text}"
        );
    }
    // Datagrams have no connection whose other end could be asked for.
    assert!(found("datagrams").contains("cannot be seen"));
    drop((stream, packets, datagrams));
    for name in ["stream", "packets", "datagrams"] {
        assert!(path(name).exists());
        check_free(&path(name)).unwrap();
    }
}
