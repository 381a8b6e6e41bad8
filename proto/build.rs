//! Generates the messages and services of every contract without a `protoc` binary.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = [
        "sluice/types/v1/types.proto",
        "sluice/cni/v1/cni.proto",
        "sluice/executor/v1/executor.proto",
        "sluice/executor/v1/descriptor.proto",
        "sluice/workload/v1/workload.proto",
        "sluice/node/v1/node.proto",
        "istio/workload/zds.proto",
    ];
    let descriptors = protox::compile(files, ["."])?;
    tonic_prost_build::configure()
        .build_transport(false)
        .type_attribute(
            ".sluice.types.v1",
            "#[derive(serde::Serialize, serde::Deserialize)]",
        )
        .type_attribute(
            "sluice.executor.v1.Sandbox",
            "#[derive(serde::Serialize, serde::Deserialize)]",
        )
        .type_attribute(".sluice.workload.v1", "#[derive(serde::Serialize)]")
        .type_attribute(
            "sluice.executor.v1.NodeStatusResponse",
            "#[derive(serde::Serialize)]",
        )
        .type_attribute("sluice.executor.v1.ProbeAddress", "#[derive(serde::Serialize)]")
        .type_attribute("sluice.executor.v1.Counter", "#[derive(serde::Serialize)]")
        .type_attribute("sluice.executor.v1.Histogram", "#[derive(serde::Serialize)]")
        .type_attribute("sluice.executor.v1.Feature", "#[derive(serde::Serialize)]")
        .type_attribute("sluice.executor.v1.SnapshotDone", "#[derive(serde::Serialize)]")
        .compile_fds(descriptors)?;
    println!("cargo:rerun-if-changed=.");
    Ok(())
}
