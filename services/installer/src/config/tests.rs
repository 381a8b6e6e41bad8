use super::*;

fn flags(extra: &[&str]) -> Result<Flags, clap::Error> {
    Cli::try_parse_from(["installer"].iter().chain(extra)).map(|cli| cli.flags)
}

#[test]
fn our_file_is_known_by_its_name() {
    assert_eq!(flags(&[]).unwrap().owned_name(), "02-sluice.conflist");
    assert_eq!(
        flags(&["--take-over"]).unwrap().owned_name(),
        "01-sluice.conflist"
    );
    let named = flags(&["--owned-name", "00-sluice.conflist", "--take-over"]).unwrap();
    assert_eq!(named.owned_name(), "00-sluice.conflist");
    for bad in [
        "02-sluice.conf",
        "-sluice.conflist",
        "a/b-sluice.conflist",
        "10-podnet.conflist",
        "",
    ] {
        assert!(flags(&["--owned-name", bad]).is_err(), "{bad}");
    }
}

#[test]
fn flags_may_follow_the_command() {
    let cli = Cli::try_parse_from(["installer", "plan", "--mode", "chained"]).unwrap();
    assert_eq!(cli.flags.mode, Mode::Chained);
    assert!(matches!(cli.command, Some(Command::Plan)));
}

#[test]
fn a_wrong_value_names_what_is_allowed() {
    let error = flags(&["--mode", "standalone"]).unwrap_err().to_string();
    assert!(error.contains("owned, chained, stand-alone"), "{error}");
    let error = flags(&["--kubeconfig", "relative"]).unwrap_err().to_string();
    assert!(error.contains("an absolute path"), "{error}");
}
