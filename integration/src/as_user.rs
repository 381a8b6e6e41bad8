//! One thread that runs as another user, for connecting as a peer that must be refused.
#![expect(unsafe_code, reason = "libc's wrappers change the user of every thread")]

use std::io;

/// Runs `f` on a thread of its own that has given up root for `uid` (user, group, no supplementary groups) for good.
///
/// # Panics
/// If `f` does.
pub fn as_user<T: Send>(uid: u32, f: impl FnOnce() -> T + Send) -> io::Result<T> {
    let outcome = std::thread::scope(|scope| {
        scope
            .spawn(move || {
                become_user(uid)?;
                Ok(f())
            })
            .join()
    });
    outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn become_user(uid: u32) -> io::Result<()> {
    let id = libc::c_long::from(uid);
    // SAFETY: setgroups(2) with a count of 0 reads no memory; the others take numbers only. The raw calls change the
    // calling thread alone, which ends with its closure.
    let codes = unsafe {
        [
            libc::syscall(
                libc::SYS_setgroups,
                0 as libc::c_long,
                std::ptr::null::<libc::gid_t>(),
            ),
            libc::syscall(libc::SYS_setresgid, id, id, id),
            libc::syscall(libc::SYS_setresuid, id, id, id),
        ]
    };
    if codes.iter().all(|code| *code == 0) {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
