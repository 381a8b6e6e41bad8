//! Resource limits.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Raises the soft limit of open files to the hard limit and returns it.
pub fn raise_open_files() -> std::io::Result<u64> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < hard {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    }
    Ok(hard)
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
