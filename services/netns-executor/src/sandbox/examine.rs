//! Looking at a sandbox: drift and its repair, `Inspect`, CNI CHECK, and namespaces that come and go.

use std::net::IpAddr;

use sluice_proto::ambient::Desired;
use sluice_proto::code::ErrorCode;
use sluice_proto::pb::executor::sandbox_event::Event;
use sluice_proto::pb::executor::{InspectResponse, Repaired};
use sluice_proto::sandbox::Failure;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::Reason;
use super::task::{Flow, Task};
use crate::kernel::Opened;
use crate::pool::COMPONENT;
use crate::rules::RULE_SCHEMA;

/// So often a namespace must be nowhere before it is given up, however long that takes.
const MIN_LOOKS: u32 = 3;

impl Task {
    /// Compares with what should be there, and mends it in one step. Watchers see it broken in between.
    pub(super) async fn examine(&mut self) {
        let Some(desired) = self
            .record
            .programmed
            .clone()
            .filter(|desired| *desired != Desired::None)
        else {
            return;
        };
        if self.add.is_some() || self.descriptor.is_none() {
            return;
        }
        if let Desired::Joining(options) = desired {
            return self.join_again(options).await;
        }
        let wanted = desired.clone();
        let differences = match self
            .with_netns("read back", move |netns| netns.differences(&wanted))
            .await
        {
            Ok(differences) => differences,
            Err(failure) => return self.set_broken(failure),
        };
        if differences.is_empty() {
            self.set_verified();
            if self.broken.take().is_some() {
                self.publish(Event::Changed);
            }
            return;
        }
        self.verified = false;
        // Without the rules conntrack may have missed some.
        self.connections_known = false;
        self.set_broken(Failure::new(
            ErrorCode::Drift,
            COMPONENT,
            "compare rules",
            differences.join("; "),
        ));
        match self.apply(desired).await {
            Ok(_) => {
                tracing::warn!(target: "audit", attachment = %self.record.attachment, pod = %self.record.pod,
                    ?differences, "drift repaired");
                self.node.metrics.repaired_pod();
                self.broken = None;
                self.set_verified();
                self.node.hub.tell(&Event::Repaired(Repaired {
                    attachment: Some((&self.record.attachment).into()),
                    differences,
                }));
                self.publish(Event::Changed);
            }
            Err(failure) => self.set_broken(failure),
        }
    }

    pub(super) fn set_broken(&mut self, failure: Failure) {
        if self.broken.as_ref() == Some(&failure) {
            return;
        }
        tracing::warn!(attachment = %self.record.attachment, pod = %self.record.pod, error = %failure, "sandbox is broken");
        self.broken = Some(failure);
        self.publish(Event::Changed);
    }

    /// Its namespace was looked for and not found.
    pub(super) fn not_found(&mut self, failure: Failure, vanished: bool) -> Flow {
        if self.descriptor.is_some() {
            return Flow::Continue(());
        }
        if vanished {
            let (since, looks) = self.vanished.unwrap_or((Instant::now(), 0));
            self.vanished = Some((since, looks + 1));
            if looks >= MIN_LOOKS && since.elapsed() >= self.node.settings.give_up {
                tracing::warn!(attachment = %self.record.attachment, pod = %self.record.pod, error = %failure,
                    looks, "namespace is given up");
                return Flow::Break(Reason::NetnsGone.into());
            }
        } else {
            self.vanished = None;
        }
        self.attempts += 1;
        let is_news = self.attempts == 1
            || self
                .broken
                .as_ref()
                .is_none_or(|broken| broken.code != failure.code);
        if is_news {
            self.set_broken(failure);
        } else {
            // Not logged: only the count is new.
            self.broken = Some(failure);
            self.publish(Event::Changed);
        }
        Flow::Continue(())
    }

    /// Takes a namespace that somebody found, if it is the right one. Whoever found it asks for [`Self::examine`] next.
    pub(super) fn reattach(
        &mut self,
        opened: Opened,
        found_by_address: bool,
        reply: oneshot::Sender<Result<(), Failure>>,
    ) -> Flow {
        let same = opened.identity.is_same_netns(&self.record.netns);
        if self.descriptor.is_some() && same {
            self.node.reaper.close(opened);
            let _ = reply.send(Ok(()));
            return Flow::Continue(());
        }
        if !same && !found_by_address {
            let (found, known) = (&opened.identity, &self.record.netns);
            let cause = format!(
                "the namespace found (cookie {}, inode {}) is not the sandbox's (cookie {}, inode {}{})",
                found.cookie,
                found.inode,
                known.cookie,
                known.inode,
                if found.boot_id == known.boot_id {
                    ""
                } else {
                    ", before a reboot"
                },
            );
            tracing::warn!(target: "audit", attachment = %self.record.attachment, cause, "namespace refused");
            self.node.reaper.close(opened);
            let _ = reply.send(Err(Failure::new(
                ErrorCode::SandboxGone,
                COMPONENT,
                "re-open namespace",
                cause,
            )));
            return Flow::Continue(());
        }
        self.attach(opened);
        let saved = if same { Ok(()) } else { self.save() };
        let _ = reply.send(saved);
        if self.record.pending {
            // The ADD did not survive the restart, so its pod never started.
            return Flow::Break(Reason::Cancelled.into());
        }
        self.publish(Event::Changed);
        Flow::Continue(())
    }

    /// Notices that the interface is gone for good.
    pub(super) async fn look_for_interface(&mut self) -> Flow {
        let ifname = self.record.attachment.ifname.clone();
        match self
            .with_netns("look for interface", move |netns| netns.has_interface(&ifname))
            .await
        {
            Ok(false) => Flow::Break(Reason::InterfaceGone.into()),
            Ok(true) => Flow::Continue(()),
            Err(failure) => {
                tracing::debug!(attachment = %self.record.attachment, error = %failure, "interface not looked for");
                Flow::Continue(())
            }
        }
    }

    /// Reads back and compares; changes nothing.
    pub(super) async fn inspect(&mut self) -> InspectResponse {
        let desired = self.record.programmed.clone().unwrap_or(Desired::None);
        let mut response = InspectResponse {
            sandbox: Some(self.view()),
            rules: crate::kernel::rules_as_text(&desired),
            rule_schema: RULE_SCHEMA,
            ..InspectResponse::default()
        };
        if self.descriptor.is_some() {
            let own = self.record.addresses.clone();
            let draining = matches!(desired, Desired::Draining(_));
            let looked = self
                .with_netns("inspect", move |netns| {
                    let redirected = if draining {
                        netns.redirected_connections(&own)?
                    } else {
                        0
                    };
                    Ok((netns.differences(&desired)?, redirected))
                })
                .await;
            match looked {
                Ok((differences, redirected)) => {
                    response.differences = differences;
                    response.redirected_connections = redirected;
                }
                Err(failure) => response.differences = vec![failure.to_string()],
            }
        }
        let owner = self.record.pod.uid.clone();
        response.probe_addresses = self.node.probes.addresses_of(owner).await.unwrap_or_default();
        response
    }

    /// CNI CHECK: rules, probe set, and whether the sandbox is at hand.
    pub(super) async fn check(&mut self) -> Vec<Failure> {
        if let Some(failure) = &self.broken {
            return vec![failure.clone()];
        }
        let Some(desired @ Desired::Ambient(_)) = self.record.programmed.clone() else {
            return Vec::new();
        };
        let mut failures = Vec::new();
        match self
            .with_netns("read back", move |netns| netns.differences(&desired))
            .await
        {
            Ok(differences) if differences.is_empty() => {}
            Ok(differences) => {
                let cause = differences.join("; ");
                failures.push(Failure::new(ErrorCode::Drift, COMPONENT, "compare rules", cause));
            }
            Err(failure) => failures.push(failure),
        }
        let (addresses, owner) = (self.record.addresses.clone(), self.record.pod.uid.clone());
        match self.node.probes.missing(addresses, owner).await {
            Ok(missing) if missing.is_empty() => {}
            Ok(missing) => {
                let list: Vec<_> = missing.iter().map(IpAddr::to_string).collect();
                let cause = format!("missing: {}", list.join(", "));
                failures.push(Failure::new(
                    ErrorCode::ProbeSet,
                    COMPONENT,
                    "host probe set",
                    cause,
                ));
            }
            Err(failure) => failures.push(failure),
        }
        failures
    }
}
