//! Whether an opener is alive and caged, for exec probes: it listens nowhere, so its processes are looked at.

use std::path::Path;

/// Looks for a process of this name, other than ourselves, under a seccomp filter (`proc_pid_status(5)`).
pub fn caged_opener_runs() -> bool {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return false;
    };
    let own = std::process::id().to_string();
    entries
        .flatten()
        .filter(|entry| entry.file_name().to_str() != Some(own.as_str()))
        .any(|entry| is_caged_opener(&entry.path()))
}

fn is_caged_opener(process: &Path) -> bool {
    let Ok(status) = std::fs::read_to_string(process.join("status")) else {
        return false;
    };
    let has = |name: &str, value: &str| {
        status
            .lines()
            .any(|line| line.split_whitespace().eq([name, value]))
    };
    has("Name:", "netns-opener") && has("Seccomp:", "2") && !status.contains("\nState:\tZ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_living_process_of_the_name_under_a_filter_counts() {
        let caged =
            "Name:\tnetns-opener\nState:\tS (sleeping)\nNoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t1\n";
        let directory = tempfile::tempdir().unwrap();
        let judged = |status: &str| {
            std::fs::write(directory.path().join("status"), status).unwrap();
            is_caged_opener(directory.path())
        };
        assert!(judged(caged));
        assert!(!judged(&caged.replace("Seccomp:\t2", "Seccomp:\t0")));
        assert!(!judged(&caged.replace("S (sleeping)", "Z (zombie)")));
        assert!(!judged(&caged.replace("netns-opener", "netns-executor")));
        assert!(!is_caged_opener(&directory.path().join("gone")));
    }
}
