//! ADDs as the tests make them: declared pods, many at the same moment, and those that must fail.

use std::sync::Barrier;

use sluice_testkit::cni::Outcome;
use sluice_testkit::pod::Pod;

use crate::cni_error::CniError;
use crate::manifests::PodOptions;
use crate::mesh::{Mesh, MeshOptions};

/// A node whose namespace `default` is in the mesh.
pub fn mesh_with(options: MeshOptions) -> anyhow::Result<Mesh> {
    let mesh = Mesh::start_with(options)?;
    mesh.manifests.namespace("default", "ambient")?;
    Ok(mesh)
}

/// A wired pod of namespace `default` whose manifest is there, not yet added.
pub fn declared(mesh: &Mesh, name: &str) -> anyhow::Result<Pod> {
    let pod = mesh.node().pod(name).create()?;
    mesh.manifests.pod(&pod, &PodOptions::default())?;
    Ok(pod)
}

/// The error of an ADD that must have failed, without a result.
///
/// # Panics
/// If it has not, or the message lacks something.
pub fn refused(outcome: &Outcome, code: &str, component: &str, pod: &Pod) -> CniError {
    assert!(
        outcome.result.is_none(),
        "a result in spite of the error: {outcome:?}"
    );
    let error =
        CniError::of(outcome.last()).unwrap_or_else(|error| panic!("ADD of {}: {error:#}", pod.name()));
    error.assert(code, component, &format!("{}/{}", pod.namespace(), pod.name()));
    error
}

/// ADDs all pods at the same moment.
///
/// # Panics
/// If a thread does.
pub fn add_together(mesh: &Mesh, pods: &[&Pod]) -> anyhow::Result<Vec<Outcome>> {
    let start = Barrier::new(pods.len());
    std::thread::scope(|scope| {
        let add = |pod| {
            let start = &start;
            scope.spawn(move || {
                start.wait();
                mesh.add(pod)
            })
        };
        let threads: Vec<_> = pods.iter().map(|pod| add(*pod)).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, anyhow::Result<Outcome>>| {
            thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).collect()
    })
}
