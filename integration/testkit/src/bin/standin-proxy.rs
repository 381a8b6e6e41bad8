//! Stand-in for ztunnel in tests and the demo; see `sluice_testkit::standin`. Not for production: no security at all.

use clap::Parser;

fn main() -> anyhow::Result<()> {
    sluice_testkit::standin::run(sluice_testkit::standin::Options::parse())
}
