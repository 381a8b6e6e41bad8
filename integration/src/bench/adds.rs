//! ADD: one by one, many at once.

use anyhow::Context;
use sluice_testkit::netns::Netns;

use super::floor;
use super::report::Report;
use super::rig::{EXEMPT, IN_MESH, OUTSIDE, Rig, together};
use super::stats::Samples;

/// Many, because what a machine does besides comes and goes within seconds.
const ROUNDS: usize = 100;
/// How often so many ADDs come at the same moment.
const BURSTS: usize = 5;

/// The rules of an enrolled pod, as `nft -f` takes them.
pub(super) fn rules(rig: &mut Rig) -> anyhow::Result<String> {
    rig.grow_to(1)?;
    let pod = rig.pods.first().context("no pod")?;
    let text = rig.mesh.describe(pod)?.rules.join("\n") + "\n";
    floor::nft(&Netns::new()?, &text).context("the rules of a pod are not what nft takes")?;
    Ok(text)
}

/// One ADD at a time, each beside its floors. No namespace is made or removed meanwhile: the kernel does most of that
/// later, beside whatever is measured next. That holds a little for rules, too, so ADD and `nft` take turns in coming first.
pub(super) fn one_by_one(report: &mut Report, rig: &mut Rig) -> anyhow::Result<()> {
    let rules = rules(rig)?;
    let place = rig.mesh.node().place().clone();
    let meshed = rig.make(ROUNDS, IN_MESH)?;
    let outside = rig.make(ROUNDS, OUTSIDE)?;
    let exempt = rig.make(ROUNDS, EXEMPT)?;
    let fresh = (0..ROUNDS).map(|_| Netns::new()).collect::<Result<Vec<_>, _>>()?;
    rig.wait_quiet()?;
    let (mut nft, mut empty) = (Samples::default(), Samples::default());
    let (mut add, mut add_outside, mut add_exempt) =
        (Samples::default(), Samples::default(), Samples::default());
    let mut del = Samples::default();
    for round in 0..ROUNDS {
        if round % 2 == 0 {
            nft.push(floor::nft(&fresh[round], &rules)?.elapsed);
            add.push(rig.add(&meshed[round])?.elapsed);
        } else {
            add.push(rig.add(&meshed[round])?.elapsed);
            nft.push(floor::nft(&fresh[round], &rules)?.elapsed);
        }
        empty.push(floor::empty(&place)?);
        add_outside.push(rig.add(&outside[round])?.elapsed);
        empty.push(floor::empty(&place)?);
        add_exempt.push(rig.add_exempt(&exempt[round])?.elapsed);
    }
    for pod in &meshed {
        del.push(rig.del(pod)?.elapsed);
    }
    let (nft_floor, empty_floor) = ((floor::NFT, nft.median()), (floor::EMPTY, empty.median()));
    report.against("ADD of a mesh pod, p50", add.median(), nft_floor, 0.75, "ms");
    report.inform("ADD of a mesh pod, p99", add.percentile(0.99), "ms");
    report.against(
        "ADD of a non-mesh pod, through the agent, p50",
        add_outside.median(),
        empty_floor,
        2.5,
        "ms",
    );
    report.against(
        "ADD of a pod in an excluded namespace, p50",
        add_exempt.median(),
        empty_floor,
        2.5,
        "ms",
    );
    report.inform("DEL of a mesh pod, p50", del.median(), "ms");
    rig.remove(meshed)?;
    rig.remove(outside)?;
    rig.remove(exempt)
}

/// `count` ADDs at the same moment, beside as many `nft -f -`, several times; keeps the last pods if `keep`.
pub(super) fn concurrent(report: &mut Report, rig: &mut Rig, count: usize, keep: bool) -> anyhow::Result<()> {
    let rules = rules(rig)?;
    let (mut floor, mut all, mut each) = (Samples::default(), Samples::default(), Samples::default());
    for burst in 1..=BURSTS {
        let fresh = (0..count).map(|_| Netns::new()).collect::<Result<Vec<_>, _>>()?;
        let pods = rig.make(count, IN_MESH)?;
        floor.push(together(count, |i| floor::nft(&fresh[i], &rules))?.1);
        let (adds, total) = together(count, |i| rig.add(&pods[i]))?;
        all.push(total);
        for add in &adds {
            each.push(add.elapsed);
        }
        if keep && burst == BURSTS {
            rig.pods.extend(pods);
        } else {
            rig.remove(pods)?;
        }
    }
    report.inform(
        &format!("{count} concurrent ADDs of mesh pods, p50"),
        each.median(),
        "ms",
    );
    report.inform(
        &format!("{count} concurrent ADDs of mesh pods, p99"),
        each.percentile(0.99),
        "ms",
    );
    report.against(
        &format!("{count} concurrent ADDs of mesh pods, all"),
        all.median(),
        (floor::NFT, floor.median()),
        1.0,
        "ms",
    );
    Ok(())
}
