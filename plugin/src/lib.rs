//! The CNI plugin: reads what the container runtime says, enters the pod's network namespace once to open netlink
//! sockets in it, makes one call to the executor and prints the CNI result. While the agent is away it asks the API server
//! in its place (`without_agent`). It keeps no state and changes nothing.
//!
//! Runs as host root, as every CNI plugin does. Its stdout belongs to the CNI result alone ([`output`]).

mod command;
mod config;
mod deadline;
mod error;
mod executor;
mod invocation;
mod log;
mod netns;
pub mod output;
mod prev_result;
mod stdin;
mod without_agent;

use command::Answer;
use deadline::Deadline;
use error::{PluginError, Subject};
use invocation::{Command, Invocation};

/// Carries out the command in the environment, prints the answer and says with which status the process must end.
pub fn run() -> i32 {
    let deadline = Deadline::start();
    let mut subject = Subject::default();
    match execute(deadline, &mut subject) {
        Ok(Answer::Nothing) => 0,
        Ok(Answer::Document(document)) => output::emit(document.as_bytes(), 0),
        Err(error) => output::emit(error.to_json(&subject).as_bytes(), 1),
    }
}

fn execute(deadline: Deadline, subject: &mut Subject) -> Result<Answer, PluginError> {
    let command = Command::from_environment()?;
    let input = stdin::read(deadline)?;
    // Remembered before anything else can fail, because an error has to be in the caller's version, too.
    let version = match (config::peek_version(&input), command) {
        (Ok(version), _) => version,
        (Err(_), Command::Version) => config::GivenVersion::default(),
        (Err(error), Command::Status) => return Ok(command::unreadable(&error)),
        (Err(error), _) => return Err(error.into()),
    };
    subject.version = version.supported().unwrap_or_default();
    output::set_version(subject.version);
    if command == Command::Version {
        return Ok(command::version(&version));
    }
    let version = version.require(command)?;
    let invocation = Invocation::from_environment(command, subject)?;
    #[cfg(debug_assertions)]
    output::panic_if_asked("parse");
    match &invocation {
        Invocation::Add(args) => command::add(args, version, &input, deadline),
        Invocation::Del(args) => Ok(command::del(args, &input, deadline)?),
        Invocation::Check(args) => command::check(args, &input, deadline),
        Invocation::Status => command::status(&input),
        Invocation::Gc => command::gc(&input, deadline),
    }
}
