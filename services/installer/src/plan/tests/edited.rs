//! Files of others that our entry goes into.

use super::*;

#[test]
fn an_edited_file_keeps_its_name_and_mode() {
    let mut node = given(&["--mode", "chained"], &[("10-podnet.conflist", PTP)]);
    let plan = node.plan();
    let [Step::Write { mode, expect, .. }] = plan.steps.as_slice() else {
        panic!("{plan:?}")
    };
    assert_eq!((*mode, expect.as_deref()), (FileMode::Kept, Some(PTP.as_bytes())));
    let plan = node.settle();
    assert_eq!(plan.effective.as_deref(), Some("10-podnet.conflist"));
    assert_eq!(node.text("10-podnet.conflist"), ptp_and_ours());
    assert_eq!(node.names(), ["10-podnet.conflist"]);
}

#[test]
fn an_edited_single_plugin_becomes_a_list_before_its_old_file_goes() {
    let text = r#"{"cniVersion":"1.0.0","name":"edge","type":"macvlan"}"#;
    let mut node = given(
        &["--mode", "chained"],
        &[("05-edge.conf", text), ("05-edge.conflist", PTP)],
    );
    let plan = node.plan();
    assert!(
        matches!(plan.steps.as_slice(), [
            Step::Write { name: list, mode: FileMode::Like { mode: 0o644, .. }, .. },
            Step::Delete { name: conf, expect: Some(_) },
        ] if list == "05-edge.conflist" && conf == "05-edge.conf"),
        "{plan:?}"
    );
    assert_eq!(problems(&node.settle()), "");
    assert_eq!(node.names(), ["05-edge.conflist"]);
}

#[test]
fn a_list_without_inline_plugins_gets_a_file_of_ours_after_its_own() {
    let files = [
        ("10-podnet.conflist", r#"{"cniVersion":"1.1.0","name":"podnet"}"#),
        ("podnet/10-ptp.conf", r#"{"type":"ptp"}"#),
    ];
    let mut node = given(&["--mode", "chained"], &files);
    let plan = node.settle();
    assert_eq!(
        (problems(&plan).as_str(), plan.effective.as_deref()),
        ("", Some("10-podnet.conflist"))
    );
    assert_eq!(node.text("10-podnet.conflist"), files[0].1);
    assert!(node.net.drop_ins["podnet"].contains_key("zz-sluice-cni.conf"));

    let mut node = given(&[], &files);
    assert_eq!(problems(&node.settle()), "");
    let list = node.net.load("02-sluice.conflist").unwrap();
    assert_eq!(list.kinds(), ["ptp", "sluice-cni"]);
    assert!(
        list.drop_ins.is_empty(),
        "the files are not appended after our entry"
    );
}

#[test]
fn files_that_an_edit_could_not_keep_as_they_are_are_not_edited() {
    let mut node = given(&["--mode", "chained"], &[("10-podnet.conflist", PTP)]);
    node.net.files.get_mut("10-podnet.conflist").unwrap().link = true;
    let plan = node.plan();
    assert!(plan.steps.is_empty() && problems(&plan).contains("symbolic link"));
    let file = node.net.files.get_mut("10-podnet.conflist").unwrap();
    (file.link, file.uid) = (false, 1000);
    let plan = node.plan();
    assert!(plan.steps.is_empty() && problems(&plan).contains("belongs to uid 1000"));
}

/// Nobody who runs the tests is in it.
const FOREIGN: u32 = 4_000_000;

#[test]
fn a_file_of_a_group_that_an_edit_could_not_keep_is_not_edited() {
    for (name, text) in [
        ("10-podnet.conflist", PTP),
        (
            "10-podnet.conf",
            r#"{"cniVersion":"1.0.0","name":"edge","type":"macvlan"}"#,
        ),
    ] {
        let mut node = given(&["--mode", "chained"], &[(name, text)]);
        node.net.files.get_mut(name).unwrap().gid = FOREIGN;
        let plan = node.plan();
        assert_eq!(plan.steps, []);
        let told = format!("{name} belongs to group {FOREIGN}");
        assert!(problems(&plan).contains(&told), "{}", problems(&plan));
        assert!(problems(&plan).contains("supplementary group"));
        // Every new file in the directory has that group by itself.
        node.net.group = Some(FOREIGN);
        assert_eq!(problems(&node.settle()), "");
        assert_eq!(node.net.files["10-podnet.conflist"].gid, FOREIGN);
    }
    let mut node = given(&[], &[("10-podnet.conflist", PTP)]);
    node.net.files.get_mut("10-podnet.conflist").unwrap().gid = FOREIGN;
    assert_eq!(problems(&node.settle()), "", "nothing of it is edited");
}
