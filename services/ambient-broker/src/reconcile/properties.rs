//! Random orders of facts: whatever happens, in whatever order, some things never do.

mod answers;
mod world;

use proptest::prelude::*;
use sluice_proto::ambient::Desired;

use world::World;

const PODS: u32 = 3;

#[derive(Debug, Clone)]
enum Step {
    Apply {
        pod: u32,
        mesh: bool,
        phase: u8,
    },
    Delete(u32),
    Namespace,
    Add(u32),
    Del(u32),
    Connect,
    Ready(usize),
    Close(usize),
    /// Answers one outstanding call, well or not.
    Answer {
        which: usize,
        well: u8,
    },
    ExecutorRestart,
    Pass(u16),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (1..=PODS, any::<bool>(), 0..4_u8).prop_map(|(pod, mesh, phase)| Step::Apply { pod, mesh, phase }),
        1 => (1..=PODS).prop_map(Step::Delete),
        1 => Just(Step::Namespace),
        3 => (1..=PODS).prop_map(Step::Add),
        2 => (1..=PODS).prop_map(Step::Del),
        2 => Just(Step::Connect),
        3 => (0..4_usize).prop_map(Step::Ready),
        1 => (0..4_usize).prop_map(Step::Close),
        20 => (0..8_usize, 0..10_u8).prop_map(|(which, well)| Step::Answer { which, well }),
        1 => Just(Step::ExecutorRestart),
        3 => (0..6_000_u16).prop_map(Step::Pass),
    ]
}

proptest! {
    // PROPTEST_CASES asks for more.
    #![proptest_config(ProptestConfig { max_shrink_iters: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn no_order_of_events_breaks_the_promises(steps in proptest::collection::vec(step(), 1..120)) {
        let mut world = World::new();
        for step in steps {
            world.run(&step);
        }
        world.quiesce();
        for (id, verdicts) in &world.adds {
            prop_assert!(*verdicts <= 1, "{id} got {verdicts} verdicts");
            prop_assert!(*verdicts == 1 || world.ended.contains(id), "{id} never got a verdict");
        }
        for (n, desired) in &world.foreseen {
            let mesh = matches!(desired, Desired::Ambient(_));
            prop_assert_eq!(world.mesh.get(n), Some(&mesh), "pod {} would be {:?}", n, desired);
        }
    }
}
