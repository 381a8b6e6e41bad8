//! Fuzz targets over text that strangers write: each an ordinary test that tries random inputs and those of its corpus, and
//! with `make fuzz` a target of libFuzzer, which looks for inputs that reach code that none has reached before.
//!
//! A crate of its own, so that little has to be built with the fuzzer's flags, under which nothing links that has no
//! fuzz target in it.

#[cfg(test)]
mod annotations;
