//! Resource limits.
#![expect(unsafe_code, reason = "mallopt has no safe wrapper")]

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Raises the soft limit of open files to the hard limit and returns it.
pub fn raise_open_files() -> std::io::Result<u64> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < hard {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    }
    Ok(hard)
}

/// Makes all threads allocate from one heap (`M_ARENA_MAX`, mallopt(3)). The services have few threads that
/// seldom allocate at the same time, and each further heap keeps its own free memory.
///
/// Call it before any other thread exists. Without glibc it does nothing.
pub fn use_one_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt changes a number inside the allocator, and no other thread exists that could be in it.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Counts this process's open descriptors.
pub fn open_files() -> std::io::Result<usize> {
    // The directory itself is open while it is read.
    Ok(std::fs::read_dir("/proc/self/fd")?.count().saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_ends_at_the_hard_one() {
        let hard = raise_open_files().unwrap();
        assert_eq!(getrlimit(Resource::RLIMIT_NOFILE).unwrap(), (hard, hard));
        assert!(open_files().unwrap() >= 3);
    }
}
