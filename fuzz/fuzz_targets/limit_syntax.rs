#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| tallygate_lab::fuzzing::limit_syntax(input));
