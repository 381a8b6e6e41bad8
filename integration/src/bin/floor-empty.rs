//! Does nothing: what it costs to execute a program at all. A floor of `make bench`.

fn main() {}
