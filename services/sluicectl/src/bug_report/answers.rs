//! What the broker answers: the node, its features, and every pod in full.

use std::path::Path;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::Collection;
use crate::client::{AskError, Broker};
use crate::render;
use crate::view::{NodeView, PodDetails, PodView};

/// All answers together have this long; a broker that hangs is asked once, not for every pod.
const ALL: Duration = Duration::from_mins(1);

/// Asks everything there is to ask.
pub(crate) async fn collect(collection: &mut Collection, run_dir: &Path) {
    if let Err(error) = ask(collection, run_dir).await {
        collection.note(format!("broker: {}", error.explain()));
    }
}

async fn ask(collection: &mut Collection, run_dir: &Path) -> Result<(), AskError> {
    let until = Instant::now() + ALL;
    let mut broker = Broker::connect(run_dir).await?;
    let node = broker.node().await?;
    add(
        collection,
        "preflight",
        &node.preflight,
        &render::preflight(&node.preflight),
    );
    let pods = broker.pods().await?.into_iter().map(PodView::from).collect();
    let view = NodeView { node, pods };
    add(
        collection,
        "status",
        &view,
        &render::node(&view, render::now_ms()),
    );
    for pod in &view.pods {
        if Instant::now() > until {
            collection.note(format!("not all pods were asked for: {ALL:?} are over"));
            break;
        }
        // One that has gone meanwhile is no reason to stop.
        match broker.describe(&pod.namespace, &pod.name).await {
            Ok(answer) => {
                let details = PodDetails::from(answer);
                let text = format!(
                    "{}\n\n{}",
                    render::pod(&details, render::now_ms()),
                    render::explanation(&details)
                );
                add(
                    collection,
                    &format!("pods/{}/{}", pod.namespace, pod.name),
                    &details,
                    &text,
                );
            }
            Err(error) => collection.note(format!("{}: {}", pod.full_name(), error.explain())),
        }
    }
    Ok(())
}

fn add(collection: &mut Collection, name: &str, value: &impl Serialize, text: &str) {
    collection.add(format!("{name}.txt"), format!("{}\n", text.trim_end()));
    match serde_json::to_vec_pretty(value) {
        Ok(json) => collection.add(format!("{name}.json"), json),
        Err(error) => collection.note(format!("{name}.json: {error}")),
    }
}
