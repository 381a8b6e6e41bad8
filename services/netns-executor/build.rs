//! Compiles the reviewed seccomp files, so that no process that is confined by one carries the compiler for it.

use std::error::Error;
use std::fmt::Write as _;
use std::path::Path;

use seccompiler::{BpfMap, TargetArch, compile_from_json};

/// Name of the constant and file of each filter.
const FILTERS: [(&str, &str); 3] = [
    ("EXECUTOR", "seccomp/netns-executor.json"),
    ("OPENER", "src/opener/seccomp-opener.json"),
    ("KEYHOLE", "src/opener/seccomp-keyhole.json"),
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    let architecture = std::env::var("CARGO_CFG_TARGET_ARCH")?;
    let mut generated = String::new();
    for (name, file) in FILTERS {
        println!("cargo::rerun-if-changed={file}");
        let program = match compile(file, &architecture) {
            Ok(program) => program,
            // Such a build serves for its unit tests; its processes refuse to start without a filter.
            Err(error) => {
                println!("cargo::warning={file} does not compile for {architecture}: {error}");
                String::new()
            }
        };
        writeln!(
            generated,
            "/// Compiled from `{file}`.\npub const {name}: &[sluice_runtime::seccomp::Instruction] = &[{program}];"
        )?;
    }
    let directory = std::env::var("OUT_DIR")?;
    std::fs::write(Path::new(&directory).join("seccomp.rs"), generated)?;
    Ok(())
}

fn compile(file: &str, architecture: &str) -> Result<String, Box<dyn Error>> {
    let json = std::fs::read(file)?;
    let filters: BpfMap = compile_from_json(json.as_slice(), TargetArch::try_from(architecture)?)?;
    let program = filters.get("process").ok_or("no filter named process")?;
    let mut text = String::new();
    for instruction in program {
        write!(
            text,
            "sluice_runtime::seccomp::Instruction {{ code: {}, jt: {}, jf: {}, k: {} }},",
            instruction.code, instruction.jt, instruction.jf, instruction.k
        )?;
    }
    Ok(text)
}
