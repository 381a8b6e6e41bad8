//! The opener's command line: six options and one command, so that the parser of the other services, several times
//! as large as the rest of this program, is not needed.

use std::ffi::OsString;
use std::path::PathBuf;

use lexopt::{Arg, Parser};
use sluice_proto::paths::RUN_DIR;

use super::path::NETNS_DIRECTORIES;

const RUN_DIR_VARIABLE: &str = "SLUICE_RUN_DIR";

/// What `--help` prints.
pub const HELP: &str = "\
Opens sockets in network namespaces for the netns-executor. Needs CAP_SYS_ADMIN and CAP_SYS_PTRACE, nothing else.

Usage: netns-opener [OPTIONS] [healthcheck]

Commands:
  healthcheck  Exit status 0 if an opener is alive and caged; for exec probes

Options:
      --run-dir <RUN_DIR>        Run-time directory; the executor listens below it [env: SLUICE_RUN_DIR] [default: /run/sluice]
      --host-proc <HOST_PROC>    The host's proc file system [default: /proc]
      --host-netns <HOST_NETNS>  The host's network namespace, if it is not that of the host's process 1
      --netns-dir <NETNS_DIR>    Directory with mounted network namespaces; may be given several times
                                 [default: /run/netns /var/run/netns /var/run/docker/netns]
      --stand-by                 If another opener serves this node, wait for its end instead of ending
  -h, --help                     Print help
  -V, --version                  Print version
";

/// What the opener was called for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Arguments {
    /// To serve.
    Serve(Settings),
    /// To say whether another one is alive and caged.
    Healthcheck,
    /// To print its help.
    Help,
    /// To print its version.
    Version,
}

/// Settings of a serving opener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Run-time directory; the executor listens below it.
    pub run_dir: PathBuf,
    /// The host's proc file system.
    pub host_proc: PathBuf,
    /// The host's network namespace, if it is not that of the host's process 1.
    pub host_netns: Option<PathBuf>,
    /// Directories with mounted network namespaces.
    pub netns_directories: Vec<PathBuf>,
    /// Wait for the end of an opener that serves this node.
    pub stand_by: bool,
}

impl Arguments {
    /// Reads the command line; an error says which argument is wrong.
    pub fn read() -> Result<Self, lexopt::Error> {
        parse(Parser::from_env(), std::env::var_os(RUN_DIR_VARIABLE))
    }
}

fn parse(mut parser: Parser, run_dir: Option<OsString>) -> Result<Arguments, lexopt::Error> {
    let mut settings = Settings {
        run_dir: run_dir.unwrap_or_else(|| RUN_DIR.into()).into(),
        host_proc: "/proc".into(),
        host_netns: None,
        netns_directories: Vec::new(),
        stand_by: false,
    };
    let mut healthcheck = false;
    while let Some(argument) = parser.next()? {
        match argument {
            Arg::Long("run-dir") => settings.run_dir = parser.value()?.into(),
            Arg::Long("host-proc") => settings.host_proc = parser.value()?.into(),
            Arg::Long("host-netns") => settings.host_netns = Some(parser.value()?.into()),
            Arg::Long("netns-dir") => settings.netns_directories.push(parser.value()?.into()),
            Arg::Long("stand-by") => settings.stand_by = true,
            Arg::Short('h') | Arg::Long("help") => return Ok(Arguments::Help),
            Arg::Short('V') | Arg::Long("version") => return Ok(Arguments::Version),
            Arg::Value(command) if command == "healthcheck" && !healthcheck => healthcheck = true,
            other => return Err(other.unexpected()),
        }
    }
    if healthcheck {
        return Ok(Arguments::Healthcheck);
    }
    if settings.netns_directories.is_empty() {
        settings.netns_directories = NETNS_DIRECTORIES.iter().map(PathBuf::from).collect();
    }
    Ok(Arguments::Serve(settings))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(arguments: &[&str], run_dir: Option<&str>) -> Result<Arguments, String> {
        let parser = Parser::from_args(arguments.iter().copied());
        parse(parser, run_dir.map(OsString::from)).map_err(|error| error.to_string())
    }

    #[test]
    fn defaults_are_the_contract_and_the_command_line_precedes_the_environment() {
        let defaults = Settings {
            run_dir: RUN_DIR.into(),
            host_proc: "/proc".into(),
            host_netns: None,
            netns_directories: NETNS_DIRECTORIES.iter().map(PathBuf::from).collect(),
            stand_by: false,
        };
        assert_eq!(parsed(&[], None), Ok(Arguments::Serve(defaults.clone())));
        for (arguments, run_dir) in [(&[][..], "/env"), (&["--run-dir", "/given"], "/given")] {
            let settings = Settings {
                run_dir: run_dir.into(),
                ..defaults.clone()
            };
            assert_eq!(parsed(arguments, Some("/env")), Ok(Arguments::Serve(settings)));
        }
    }

    #[test]
    fn every_option_is_taken_in_both_forms() {
        let both = [
            "--host-proc=/host/proc",
            "--host-netns",
            "/host/ns",
            "--netns-dir",
            "/a",
            "--stand-by",
            "--netns-dir=/b",
        ];
        let Ok(Arguments::Serve(settings)) = parsed(&both, None) else {
            panic!("not taken");
        };
        assert_eq!(settings.host_proc, PathBuf::from("/host/proc"));
        assert_eq!(settings.host_netns, Some("/host/ns".into()));
        assert_eq!(settings.netns_directories, [PathBuf::from("/a"), "/b".into()]);
        assert!(settings.stand_by);
        assert_eq!(parsed(&["healthcheck"], None), Ok(Arguments::Healthcheck));
        assert_eq!(parsed(&["--help"], None), Ok(Arguments::Help));
        assert_eq!(parsed(&["-V"], None), Ok(Arguments::Version));
        assert!(NETNS_DIRECTORIES.iter().all(|directory| HELP.contains(directory)) && HELP.contains(RUN_DIR));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (arguments, named) in [
            (&["--run-dri", "/x"][..], "--run-dri"),
            (&["--run-dir"], "--run-dir"),
            (&["check"], "check"),
            (&["healthcheck", "healthcheck"], "healthcheck"),
        ] {
            let error = parsed(arguments, None).unwrap_err();
            assert!(error.contains(named), "{error}");
        }
    }
}
