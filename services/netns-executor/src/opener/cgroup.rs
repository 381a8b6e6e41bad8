//! Which pod a process belongs to, read from its control groups (`/proc/PID/cgroup`, cgroups(7)).
//!
//! Covers cgroupfs and systemd drivers, containerd's colon form, nested nodes and cgroup namespaces, v1 and v2.

/// The pod and container a control group path names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Membership {
    /// Pod UID with `-` as separator, as far as the path has separators; empty if the path names only a container.
    pub(super) uid: String,
    /// Container id.
    pub(super) container: String,
}

/// Reads a whole cgroup file. `None`: not a pod's process, malformed, or lines that contradict each other.
pub(super) fn parse(text: &str) -> Option<Membership> {
    let mut found: Option<Membership> = None;
    let mut previous = None;
    for line in text.lines() {
        let path = line.splitn(3, ':').nth(2)?;
        // Under cgroup v1 every hierarchy mostly repeats the path.
        if previous.replace(path) == Some(path) {
            continue;
        }
        let Some(membership) = parse_path(path) else {
            continue;
        };
        match &found {
            Some(first) if *first != membership => return None,
            _ => found = Some(membership),
        }
    }
    found
}

fn parse_path(path: &str) -> Option<Membership> {
    let path = path.strip_suffix(".scope").unwrap_or(path);
    match (pod_container(path), bare_crio(path)) {
        (Some(membership), None) => Some(membership),
        (None, Some(container)) => Some(Membership {
            uid: String::new(),
            container,
        }),
        _ => None,
    }
}

/// `... PUNCT "pod" uid PUNCT { word PUNCT } container`; the rightmost match counts (nested nodes).
fn pod_container(path: &str) -> Option<Membership> {
    path.rmatch_indices("pod").find_map(|(at, _)| {
        let before = path[..at].chars().next_back()?;
        let (uid, rest) = leading_uid(&path[at + 3..])?;
        let words = rest.strip_prefix(is_punctuation)?;
        let container = words.rsplit(is_punctuation).next()?;
        (is_punctuation(before) && words.split(is_punctuation).all(|word| !word.is_empty())).then(|| {
            Membership {
                uid,
                container: container.to_owned(),
            }
        })
    })
}

/// CRI-O below a path without punctuation: names a container but no pod.
fn bare_crio(path: &str) -> Option<String> {
    let (before, after) = path.rsplit_once("crio")?;
    let container = after.strip_prefix(is_punctuation)?;
    let plain = |text: &str| !text.is_empty() && !text.contains(is_punctuation);
    let before_is_plain = before.chars().all(|c| c == '/' || c == '.' || !is_punctuation(c));
    (plain(container) && before_is_plain).then(|| container.to_owned())
}

/// 8, 4, 4, 4 and 12 hexadecimal digits, each optionally followed by one punctuation character.
fn leading_uid(text: &str) -> Option<(String, &str)> {
    let mut uid = String::with_capacity(36);
    let mut rest = text;
    for (index, digits) in [8, 4, 4, 4, 12].into_iter().enumerate() {
        if index > 0
            && let Some(after) = rest.strip_prefix(is_punctuation)
        {
            uid.push('-');
            rest = after;
        }
        let group = rest.get(..digits)?;
        if !group.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        uid.push_str(group);
        rest = &rest[digits..];
    }
    Some((uid, rest))
}

fn is_punctuation(c: char) -> bool {
    c.is_ascii_punctuation()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const UID: &str = "2c48913c-b29f-11e7-9350-020968147796";

    fn pair(path: &str) -> Option<(String, String)> {
        parse(&format!("0::{path}\n")).map(|found| (found.uid, found.container))
    }

    #[test]
    fn every_layout_names_its_pod_and_container() {
        let nested = "/system.slice/docker-8445.scope/kubelet.slice/kubelet-kubepods.slice/\
                      kubelet-kubepods-besteffort.slice/\
                      kubelet-kubepods-besteffort-pod863b91d4_4b68_4efa_917f_4b560e3e86aa.slice/cri-containerd-75c7.scope";
        for (path, uid, container) in [
            (
                "/kubepods/burstable/pod2c48913c-b29f-11e7-9350-020968147796/9bca8d",
                UID,
                "9bca8d",
            ),
            (
                "/kubepods.slice/kubepods-burstable.slice/\
                 kubepods-burstable-pod2c48913c-b29f-11e7-9350-020968147796.slice/docker-9bca.scope",
                UID,
                "9bca",
            ),
            (
                "/kubepods-besteffort-pod72f7f152_440c_66ac_9084_e0fc1d8a910c.slice:cri-containerd:b2a1",
                "72f7f152-440c-66ac-9084-e0fc1d8a910c",
                "b2a1",
            ),
            ("/../../pod2c48913c-b29f-11e7-9350-020968147796/9bca", UID, "9bca"),
            (nested, "863b91d4-4b68-4efa-917f-4b560e3e86aa", "75c7"),
            (
                "/kubepods/burstable/pod2c48913c-b29f-11e7-9350-020968147796/9bca/init.scope",
                UID,
                "init",
            ),
            (
                "/kubepods/pod2c48913cb29f11e79350020968147796/9bca",
                "2c48913cb29f11e79350020968147796",
                "9bca",
            ),
            ("/../crio-4549.scope", "", "4549"),
        ] {
            assert_eq!(pair(path), Some((uid.to_owned(), container.to_owned())), "{path}");
        }
    }

    #[test]
    fn paths_that_name_no_container_name_no_pod() {
        for path in [
            format!("/kubepods/burstable/pod{UID}"),
            format!("pod{UID}/9bca"),
            format!("/kubepods/pod{UID}//9bca"),
            format!("/kubepods/pod{}/9bca", &UID[..35]),
            "/user.slice".to_owned(),
            "/".to_owned(),
            String::new(),
        ] {
            assert_eq!(pair(&path), None, "{path}");
        }
    }

    #[test]
    fn lines_that_contradict_each_other_reject_the_process() {
        let line = |uid: &str, cid: &str| format!("3:memory:/kubepods/pod{uid}/{cid}\n");
        let other = "72f7f152-440c-66ac-9084-e0fc1d8a910c";
        assert!(parse(&(line(UID, "a1") + &line(UID, "a1"))).is_some());
        assert!(parse(&("1:name=systemd:/user.slice\n".to_owned() + &line(UID, "a1"))).is_some());
        assert_eq!(parse(&(line(UID, "a1") + &line(UID, "b2"))), None);
        assert_eq!(parse(&(line(UID, "a1") + &line(other, "a1"))), None);
        assert_eq!(parse("garbage\n"), None);
        assert_eq!(parse(""), None);
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(text in "\\PC{0,200}", tail in "[-/:._a-fp0-9od]{0,80}") {
            let _ = parse(&text);
            let _ = parse(&format!("0::/pod{tail}"));
        }
    }
}
