use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

const PRIVATE: FileMode = FileMode::Exactly(0o600);

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

#[test]
fn a_file_is_replaced_by_another_one_with_the_mode_that_was_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.conflist");
    fs::write(&path, "old").unwrap();
    // Held open: the inode number of a file that is gone may be given to the next one.
    let old = fs::File::open(&path).unwrap();
    for wanted in [0o600, 0o640, 0o755] {
        write(&path, b"new", FileMode::Exactly(wanted), None).unwrap();
        assert_eq!(mode(&path), wanted);
    }
    assert_eq!(fs::read(&path).unwrap(), b"new");
    assert_ne!(fs::metadata(&path).unwrap().ino(), old.metadata().unwrap().ino());
    assert_eq!(std::io::read_to_string(old).unwrap(), "old");
    assert_eq!(names(directory.path()), ["a.conflist"]);
}

#[test]
fn an_edited_file_keeps_mode_and_extended_attributes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.conflist");
    fs::write(&path, "old").unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o604)).unwrap();
    let supported = rustix::fs::lsetxattr(&path, "user.origin", b"vendor", XattrFlags::empty());
    write(&path, b"new", FileMode::Kept, Some(b"old")).unwrap();
    assert_eq!(
        (fs::read(&path).unwrap().as_slice(), mode(&path)),
        (b"new".as_slice(), 0o604)
    );
    let mut value = [0; 64];
    let kept = rustix::fs::lgetxattr(&path, "user.origin", value.as_mut_slice());
    match supported {
        Ok(()) => assert_eq!(&value[..kept.unwrap()], b"vendor"),
        // A temporary directory on a file system without them has none to lose.
        Err(errno) => assert_eq!(errno, Errno::NOTSUP),
    }
    assert_eq!(names(directory.path()), ["a.conflist"]);
}

#[test]
fn a_change_by_somebody_else_is_not_lost() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.conflist");
    fs::write(&path, "theirs").unwrap();
    let error = write(&path, b"ours", FileMode::Kept, Some(b"old")).unwrap_err();
    assert!(matches!(error, FileError::Changed { .. }), "{error}");
    assert_eq!(fs::read(&path).unwrap(), b"theirs");
    assert!(matches!(
        delete(&path, Some(b"old")),
        Err(FileError::Changed { .. })
    ));
    assert_eq!(names(directory.path()), ["a.conflist"]);
    fs::remove_file(&path).unwrap();
    assert!(write(&path, b"ours", PRIVATE, Some(b"old")).is_err());
    assert!(names(directory.path()).is_empty());
}

#[test]
fn of_what_somebody_else_writes_meanwhile_the_newest_stays() {
    let directory = tempfile::tempdir().unwrap();
    let (path, theirs) = (
        directory.path().join("a.conflist"),
        directory.path().join("theirs"),
    );
    let by_rename = |number: u32| {
        fs::write(&theirs, number.to_string()).unwrap();
        fs::rename(&theirs, &path).unwrap();
    };
    // Into the file that is there, be it ours.
    let in_place = |number: u32| fs::write(&path, number.to_string()).unwrap();
    let ways: [(&str, &dyn Fn(u32)); 2] = [("by rename", &by_rename), ("in place", &in_place)];
    for (way, write) in ways {
        for writes in 0..6 {
            fs::write(&path, "0").unwrap();
            let ours = Successor::of(&path, FileMode::Kept, |file| file.write_all(b"ours")).unwrap();
            let mut written = 0;
            let exchanged = ours.exchange(b"0", |ours| {
                if written < writes {
                    written += 1;
                    write(written);
                }
                ours.swap()
            });
            let found = fs::read_to_string(&path).unwrap();
            if writes == 0 {
                assert!(exchanged.is_ok() && found == "ours", "{found}: {exchanged:?}");
            } else {
                assert!(
                    matches!(exchanged, Err(FileError::Changed { .. })),
                    "{exchanged:?}"
                );
                assert_eq!(found, writes.to_string(), "{way}");
            }
            assert_eq!(names(directory.path()), ["a.conflist"]);
        }
    }
}

#[test]
fn a_file_that_somebody_removes_while_it_is_put_back_stays_away() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.conflist");
    fs::write(&path, "theirs").unwrap();
    let ours = Successor::of(&path, FileMode::Kept, |file| file.write_all(b"ours")).unwrap();
    let mut swaps = 0;
    let exchanged = ours.exchange(b"old", |ours| {
        swaps += 1;
        if swaps == 2 {
            fs::remove_file(&path).unwrap();
        }
        ours.swap()
    });
    assert!(
        matches!(exchanged, Err(FileError::Changed { .. })),
        "{exchanged:?}"
    );
    assert!(names(directory.path()).is_empty());
}

#[test]
fn a_reader_never_sees_a_part() {
    let directory = tempfile::tempdir().unwrap();
    let (source, path) = (directory.path().join("source"), directory.path().join("plugin"));
    let versions: Vec<Vec<u8>> = (0..2).map(|number| vec![number; 300_000]).collect();
    fs::write(&path, &versions[0]).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut seen = 0;
            while !done.load(Ordering::Relaxed) {
                let found = fs::read(&path).unwrap();
                assert!(versions.contains(&found));
                seen += 1;
            }
            seen
        });
        for number in 0..50 {
            fs::write(&source, &versions[number % 2]).unwrap();
            copy(&source, &path, 0o755).unwrap();
        }
        done.store(true, Ordering::Relaxed);
        assert!(reader.join().unwrap() > 0);
    });
}

#[test]
fn a_running_program_can_be_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("sleep");
    copy(Path::new("/bin/sleep"), &path, 0o755).unwrap();
    #[expect(
        clippy::disallowed_methods,
        reason = "the test runs the program that is replaced"
    )]
    let mut running = std::process::Command::new(&path).arg("60").spawn().unwrap();
    copy(Path::new("/bin/true"), &path, 0o755).unwrap();
    assert!(same(Path::new("/bin/true"), &path).unwrap());
    assert!(running.try_wait().unwrap().is_none());
    running.kill().unwrap();
    running.wait().unwrap();
}

#[test]
fn a_failed_write_leaves_nothing_behind() {
    let directory = tempfile::tempdir().unwrap();
    let taken = directory.path().join("taken");
    fs::create_dir(&taken).unwrap();
    fs::write(taken.join("in the way"), "").unwrap();
    assert!(write(&taken, b"x", PRIVATE, None).is_err());
    let error = write(&directory.path().join("no/such"), b"x", PRIVATE, None).unwrap_err();
    assert!(
        error.to_string().starts_with("cannot create a file to replace"),
        "{error}"
    );
    assert_eq!(names(directory.path()), ["taken"]);
}

#[test]
fn only_our_own_temporary_files_are_swept() {
    let directory = tempfile::tempdir().unwrap();
    for name in [
        "sluice-cni.sluice-tmp.1",
        "a.conflist.sluice-tmp.1234567890",
        "a.conflist.tmp.1",
        "x.sluice-tmp.",
        "x.sluice-tmp.1a",
        ".sluice-tmp.5",
    ] {
        fs::write(directory.path().join(name), "").unwrap();
    }
    assert!(sweep(directory.path()).is_empty());
    assert_eq!(
        names(directory.path()),
        [
            ".sluice-tmp.5",
            "a.conflist.tmp.1",
            "x.sluice-tmp.",
            "x.sluice-tmp.1a"
        ]
    );
}

#[test]
fn nothing_that_is_not_a_short_regular_file_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let pipe = directory.path().join("pipe.conf");
    rustix::fs::mknodat(CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    assert!(
        read(&pipe)
            .unwrap_err()
            .to_string()
            .contains("not a regular file")
    );
    let long = directory.path().join("long.conf");
    File::create(&long).unwrap().set_len(LONGEST + 1).unwrap();
    assert!(read(&long).unwrap_err().to_string().contains("longer than"));
    let link = directory.path().join("link.conf");
    symlink(directory.path().join("absent"), &link).unwrap();
    assert_eq!(read(&link).unwrap_err().kind(), io::ErrorKind::NotFound);
}

#[test]
fn files_are_the_same_only_byte_for_byte() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str, bytes: &[u8]| {
        let path = directory.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    let long = vec![7; 200_000];
    let mut other = long.clone();
    *other.last_mut().unwrap() = 8;
    let (one, two, three, four) = (
        path("1", &long),
        path("2", &long),
        path("3", &other),
        path("4", &long[1..]),
    );
    assert!(same(&one, &two).unwrap());
    assert!(!same(&one, &three).unwrap() && !same(&one, &four).unwrap() && !same(&four, &one).unwrap());
}
