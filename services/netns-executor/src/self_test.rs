//! Proof that this process still works: a scratch namespace goes through the real path every minute, and a call that
//! hangs on the pool is noticed. The health probe fails on either.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sluice_proto::ambient::{AmbientOptions, Desired};
use sluice_proto::code::ErrorCode;
use sluice_proto::opener::OpenerRequest;
use sluice_proto::sandbox::Failure;
use tokio::time::Instant;

use crate::kernel::Opened;
use crate::node::Node;
use crate::pool::{self, COMPONENT};

const LOOK: Duration = Duration::from_secs(1);
const STAGE: &str = "self-test";

static STUCK: Mutex<Option<String>> = Mutex::new(None);
static FAILED: Mutex<Option<String>> = Mutex::new(None);

fn set(verdict: &Mutex<Option<String>>, value: Option<String>) {
    *verdict.lock().unwrap_or_else(PoisonError::into_inner) = value;
}

/// What is wrong with this process, if anything.
pub fn verdict() -> Result<(), String> {
    for verdict in [&STUCK, &FAILED] {
        if let Some(wrong) = verdict.lock().unwrap_or_else(PoisonError::into_inner).clone() {
            return Err(wrong);
        }
    }
    Ok(())
}

/// Tests for ever.
pub async fn run(node: Arc<Node>) {
    // Apart: a test that hangs is what the watchdog is for.
    tokio::join!(watch(node.settings.stuck), test(&node));
}

async fn watch(limit: Duration) {
    let mut look = tokio::time::interval(LOOK.min(limit / 4));
    loop {
        look.tick().await;
        let stuck = pool::oldest_call().filter(|age| *age > limit);
        let told = stuck.map(|busy| format!("a kernel call has been running for {} s", busy.as_secs()));
        set(&STUCK, told);
    }
}

async fn test(node: &Arc<Node>) {
    let mut look = tokio::time::interval(LOOK.min(node.settings.self_test));
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut tested: Option<Instant> = None;
    loop {
        look.tick().await;
        let is_due = tested.is_none_or(|at| at.elapsed() >= node.settings.self_test);
        if is_due && node.opener.is_connected() {
            tested = Some(Instant::now());
            let outcome = Box::pin(scratch(node)).await;
            if let Err(failure) = &outcome {
                tracing::error!(error = %failure, "self-test failed");
            }
            set(&FAILED, outcome.err().map(|failure| failure.to_string()));
        }
    }
}

/// A scratch namespace from the opener: programmed, read back, emptied.
async fn scratch(node: &Arc<Node>) -> Result<(), Failure> {
    let descriptors = match node.opener.open(&OpenerRequest::Scratch, None).await {
        Ok(descriptors) => descriptors,
        // The opener's own health is not ours.
        Err(error) => {
            tracing::warn!(%error, "self-test without a scratch namespace");
            return Ok(());
        }
    };
    let opened = node
        .kernel
        .open(descriptors)
        .map_err(|refusal| refusal.failure(STAGE))?;
    let reaper = node.reaper.clone();
    pool::run(STAGE, move || {
        let mut opened = opened;
        let outcome = cycle(&mut opened);
        reaper.close(opened);
        outcome
    })
    .await
}

fn cycle(opened: &mut Opened) -> Result<(), Failure> {
    let desired = Desired::Ambient(AmbientOptions::default());
    opened.netns.raise_loopback()?;
    opened.netns.apply(&desired)?;
    let differences = opened.netns.differences(&desired)?;
    opened.netns.apply(&Desired::None)?;
    if differences.is_empty() {
        return Ok(());
    }
    let cause = format!("rules read back differ: {}", differences.join("; "));
    Err(Failure::new(ErrorCode::Drift, COMPONENT, STAGE, cause))
}
