//! ADD: hand the pod's namespace to the executor and wait until the pod may start.

use std::time::Duration;

use sluice_proto::code::ErrorCode;
use sluice_proto::id::PodRef;
use sluice_proto::paths::DEADLINES;
use sluice_proto::pb::cni::{AddRequest, AddResponse, add_response::Outcome};
use sluice_selection::is_static_uid;

use super::{Answer, attachment, exempt, hand_over};
use crate::config::{NetworkConfig, Settings, SpecVersion, StaticPods};
use crate::deadline::Deadline;
use crate::error::{PluginError, chain};
use crate::executor::{self, ExecutorError};
use crate::invocation::{AttachmentArgs, EnvironmentError};
use crate::log::{Level, configure, line};
use crate::netns::PodNetns;
use crate::prev_result::addresses;
use crate::without_agent::{self, Away, Decision, Undecided, WithoutAgent};

/// A call is not begun with less time than this.
const LEAST_FOR_CALL: Duration = Duration::from_secs(2);
/// Between two tries for a pod that needs the agent.
const PAUSE: Duration = Duration::from_millis(100);

pub(crate) fn add(
    args: &AttachmentArgs,
    version: SpecVersion,
    input: &[u8],
    deadline: Deadline,
) -> Result<Answer, PluginError> {
    let config = NetworkConfig::parse(input)?;
    let settings = config.settings()?;
    configure(&settings);
    let passed = || {
        Answer::Document(match config.prev_result {
            Some(result) => result.to_owned(),
            None => format!(r#"{{"cniVersion":"{}"}}"#, version.as_str()),
        })
    };
    let container_id = args.container_id.as_str();
    match exempt(args, &settings) {
        Err(exemption) => {
            let fields = [("container_id", container_id), ("reason", exemption.as_str())];
            line(Level::Debug, "passed without asking", &fields);
        }
        Ok(pod) => {
            let pod = pod.identified()?;
            let attempt = Attempt {
                message: request(args, &config, &settings, &pod)?,
                pod,
                args,
                settings: &settings,
                deadline,
            };
            let lacking = hand_over::wanted(&settings);
            hand_over::host(&lacking, &settings, deadline);
            attempt.admit()?;
            let own = attachment(&config, &settings, args);
            hand_over::sandboxes(&lacking, &own, &settings, deadline);
        }
    }
    Ok(passed())
}

fn request(
    args: &AttachmentArgs,
    config: &NetworkConfig<'_>,
    settings: &Settings,
    pod: &PodRef,
) -> Result<AddRequest, PluginError> {
    let netns = args
        .netns
        .as_ref()
        .ok_or(EnvironmentError::Missing("CNI_NETNS"))?;
    // A network of its own gets no result of the primary's: the executor reads the addresses from the interface.
    let addresses = config
        .prev_result
        .filter(|_| !settings.stand_alone)
        .map(|result| addresses(result, args.ifname.as_str()))
        .transpose()?
        .unwrap_or_default();
    Ok(AddRequest {
        attachment: Some((&attachment(config, settings, args)).into()),
        pod: Some(pod.into()),
        netns_path: netns.to_string(),
        addresses,
        config_hash: settings
            .selection
            .as_ref()
            .map(sluice_selection::SelectionConfig::hash)
            .unwrap_or_default(),
    })
}

/// One ADD of one pod that is not exempt.
struct Attempt<'a> {
    message: AddRequest,
    pod: PodRef,
    args: &'a AttachmentArgs,
    settings: &'a Settings,
    deadline: Deadline,
}

impl Attempt<'_> {
    /// Comes back without an error exactly if the pod may start.
    fn admit(&self) -> Result<(), PluginError> {
        let path = self.args.netns.as_ref();
        let mut netns = PodNetns::enter(path.ok_or(EnvironmentError::Missing("CNI_NETNS"))?)?;
        let Some(away) = self.call(&mut netns, DEADLINES.connect)? else {
            self.log(Level::Info, "admitted", &[]);
            return Ok(());
        };
        let deadline = self.deadline.without_agent();
        match without_agent::decide(self.settings, &self.pod, &netns, deadline) {
            Ok(Decision::Outside(reason)) => {
                self.log_decided(&away, "outside", &reason);
                Ok(())
            }
            Ok(Decision::InMesh(reason)) => {
                self.log_decided(&away, "in mesh", &reason);
                self.wait(&mut netns, away, reason)
            }
            Err(why) => self.undecided(away, why),
        }
    }

    /// Asks the executor. `None`: the pod may start.
    fn call(&self, netns: &mut PodNetns, connect: Duration) -> Result<Option<Away>, PluginError> {
        let descriptors = netns.open_sockets()?;
        #[cfg(debug_assertions)]
        crate::output::panic_if_asked("netns");
        let (message, deadline) = (self.message.clone(), self.deadline);
        let path = self.settings.run_dir.cni_socket();
        let answer = executor::call(&path, descriptors, connect, deadline, |mut client| async move {
            #[cfg(debug_assertions)]
            crate::output::panic_if_asked("call");
            client.add(executor::request(message, deadline)).await
        });
        match answer {
            Ok(response) => judge(response),
            Err(error) if error.error_code() == ErrorCode::ExecutorUnreachable => {
                Ok(Some(Away::Executor(error)))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// A pod of the mesh has nothing to win from being refused while there is time left: the kubelet would make a new
    /// sandbox only after its back-off, and an agent that is being upgraded is back before that.
    fn wait(&self, netns: &mut PodNetns, mut away: Away, reason: String) -> Result<(), PluginError> {
        loop {
            let left = self.deadline.left().saturating_sub(LEAST_FOR_CALL + PAUSE);
            if left.is_zero() {
                return Err(WithoutAgent::InMesh { away, reason }.into());
            }
            std::thread::sleep(PAUSE);
            match self.call(netns, left)? {
                None => {
                    self.log(Level::Info, "admitted", &[]);
                    return Ok(());
                }
                Some(still) => away = still,
            }
        }
    }

    fn undecided(&self, away: Away, why: Undecided) -> Result<(), PluginError> {
        let spared = self.settings.static_pods == StaticPods::Pass && is_static_uid(self.pod.uid.as_str());
        let denied = why.is_denial();
        let error = WithoutAgent::Undecided { away, why };
        let cause = error.explanation();
        if !spared || denied {
            let code = error.error_code().as_str();
            let fields = [("code", code), ("error", &cause)];
            self.log(Level::Warn, "agent away, nobody could decide", &fields);
            return Err(error.into());
        }
        self.log(Level::Warn, "static pod passed unprotected", &[("error", &cause)]);
        let run_dir = &self.settings.run_dir;
        if let Err(error) = without_agent::record(run_dir, &self.pod, &self.args.container_id, &cause) {
            let error = chain(&error);
            self.log(
                Level::Warn,
                "no record of an unprotected pod",
                &[("error", &error)],
            );
        }
        Ok(())
    }

    fn log_decided(&self, away: &Away, verdict: &str, reason: &str) {
        let away = chain(away);
        let fields = [("agent", away.as_str()), ("verdict", verdict), ("reason", reason)];
        self.log(Level::Warn, "agent away, the API server decided", &fields);
    }

    fn log(&self, level: Level, message: &str, fields: &[(&str, &str)]) {
        let pod = self.pod.to_string();
        let subject = [
            ("pod", pod.as_str()),
            ("container_id", self.args.container_id.as_str()),
        ];
        line(level, message, &[&subject, fields].concat());
    }
}

/// Anything but an explicit yes keeps the pod from starting.
fn judge(response: AddResponse) -> Result<Option<Away>, PluginError> {
    match response.outcome {
        Some(Outcome::Admitted(_)) => Ok(None),
        Some(Outcome::Refused(failure)) => Err(PluginError::Refused(failure.into())),
        Some(Outcome::NoBroker(waited)) => Ok(Some(Away::Broker {
            waited_ms: waited.waited_ms,
        })),
        None => Err(ExecutorError::NoOutcome.into()),
    }
}
