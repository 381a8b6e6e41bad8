use sluice_proto::ambient::AmbientOptions;
use sluice_proto::id::{ContainerId, InterfaceName, Namespace, NetworkName, PodName, PodUid};

use super::*;

pub(crate) fn record(container: &str) -> Record {
    Record {
        format: FORMAT,
        attachment: Attachment {
            network_name: NetworkName::parse("net").unwrap(),
            container_id: ContainerId::parse(container).unwrap(),
            ifname: InterfaceName::parse("eth0").unwrap(),
        },
        generation: 7,
        pod: PodRef {
            namespace: Namespace::parse("team-a").unwrap(),
            name: PodName::parse("web-1").unwrap(),
            uid: PodUid::parse("uid-1").unwrap(),
        },
        addresses: vec!["10.0.0.5".parse().unwrap(), "fd00::5".parse().unwrap()],
        netns: NetnsIdentity {
            cookie: 42,
            device: 4,
            inode: 4_026_532_001,
            boot_id: "boot".into(),
        },
        netns_path: "/run/netns/x".into(),
        added_unix_ms: 1_000,
        programmed: Some(Desired::Ambient(AmbientOptions::default())),
        rule_schema: 1,
        admitted: true,
        pending: false,
        adopted: false,
    }
}

#[test]
fn a_sandbox_survives_the_disk() {
    let directory = tempfile::tempdir().unwrap();
    let table = Table::open(directory.path().join("a/b")).unwrap();
    table.write(&record("one")).unwrap();
    table.write(&record("two")).unwrap();
    table.remove(&record("one").attachment).unwrap();
    table.remove(&record("one").attachment).unwrap();
    let (records, unreadable) = table.load().unwrap();
    assert_eq!(records, [record("two")]);
    assert!(unreadable.is_empty());
}

#[test]
fn a_file_from_before_rule_schemas_were_recorded_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let table = Table::open(directory.path()).unwrap();
    table.write(&record("old")).unwrap();
    let path = table.path_of(&record("old").attachment);
    let mut file: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    file.as_object_mut().unwrap().remove("rule_schema").unwrap();
    fs::write(&path, file.to_string()).unwrap();
    let (records, unreadable) = table.load().unwrap();
    assert!(unreadable.is_empty(), "{unreadable:?}");
    let expected = Record {
        rule_schema: 0,
        ..record("old")
    };
    assert_eq!(records, [expected]);
}

#[test]
fn a_damaged_file_is_moved_aside_and_the_others_are_read() {
    let directory = tempfile::tempdir().unwrap();
    let table = Table::open(directory.path()).unwrap();
    table.write(&record("good")).unwrap();
    for (name, content) in [
        ("half.json", r#"{"format":1,"atta"#.to_owned()),
        (
            "unknown.json",
            serde_json::to_string(&record("good"))
                .unwrap()
                .replacen('{', r#"{"more":1,"#, 1),
        ),
        ("wrong-name.json", serde_json::to_string(&record("good")).unwrap()),
    ] {
        fs::write(directory.path().join(name), content).unwrap();
    }
    let (records, unreadable) = table.load().unwrap();
    assert_eq!(records, [record("good")]);
    assert_eq!(unreadable.len(), 3);
    for file in unreadable {
        assert!(file.path.extension().unwrap() == "unreadable" && file.path.exists());
    }
    assert!(table.load().unwrap().1.is_empty(), "reported once");
}

#[test]
fn long_ids_have_distinct_file_names_that_fit() {
    let mut one = record(&"a".repeat(253)).attachment;
    let two = record(&format!("{}b", "a".repeat(252))).attachment;
    one.network_name = NetworkName::parse("n".repeat(253)).unwrap();
    let long_two = Attachment {
        network_name: one.network_name.clone(),
        ..two
    };
    assert_ne!(file_stem(&one), file_stem(&long_two));
    assert!(file_stem(&one).len() < 240);
}
