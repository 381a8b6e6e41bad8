//! Whether an opener is alive and caged, for exec probes: it listens nowhere, so its processes are looked at.

use std::path::Path;

/// Looks for a process of this name, other than ourselves, under a seccomp filter of its own: more filters than
/// we have from the container's runtime (`proc_pid_status(5)`).
pub fn caged_opener_runs() -> bool {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return false;
    };
    let own = std::process::id().to_string();
    let from_runtime = seccomp_filters(&status(Path::new("/proc/self")));
    entries
        .flatten()
        .filter(|entry| entry.file_name().to_str() != Some(own.as_str()))
        .any(|entry| is_caged_opener(&status(&entry.path()), from_runtime))
}

fn status(process: &Path) -> String {
    std::fs::read_to_string(process.join("status")).unwrap_or_default()
}

fn is_caged_opener(status: &str, from_runtime: u32) -> bool {
    field(status, "Name:") == Some("netns-opener")
        && seccomp_filters(status) > from_runtime
        && field(status, "State:").is_some_and(|state| !state.starts_with('Z'))
}

fn seccomp_filters(status: &str) -> u32 {
    field(status, "Seccomp_filters:")
        .and_then(|count| count.parse().ok())
        .unwrap_or(0)
}

fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_living_process_of_the_name_under_a_filter_of_its_own_counts() {
        let caged =
            "Name:\tnetns-opener\nState:\tS (sleeping)\nNoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t2\n";
        assert!(is_caged_opener(caged, 1));
        assert!(!is_caged_opener(caged, 2));
        assert!(!is_caged_opener(&caged.replace("filters:\t2", "filters:\t0"), 0));
        assert!(!is_caged_opener(&caged.replace("S (sleeping)", "Z (zombie)"), 1));
        assert!(!is_caged_opener(
            &caged.replace("netns-opener", "netns-executor"),
            1
        ));
        assert!(!is_caged_opener("", 0));
    }
}
