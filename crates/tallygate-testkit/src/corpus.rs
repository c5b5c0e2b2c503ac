//! Runs fuzz targets on their seeds in `fuzz/corpus`, and on random mutations of them.
//!
//! A fuzzer follows the code coverage and finds more. This needs no nightly compiler, takes a second, and tries the same
//! mutations every time.

use std::path::Path;

use fastrand::Rng;

/// Runs a target on its seeds and on a number of mutations of them.
///
/// # Panics
/// Panics if the target panics, after printing the input, or if the target has no seeds.
pub fn try_corpus(target: &str, mutations: usize, run: impl Fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let files = std::fs::read_dir(&folder).expect("the target has a folder of seeds");
    let mut files: Vec<_> =
        files.map(|file| file.expect("the folder can be listed").path()).collect();
    files.sort();
    let seeds: Vec<_> =
        files.iter().map(|file| std::fs::read(file).expect("the seed can be read")).collect();
    let run = |input: &[u8]| {
        let _guard = PrintOnPanic(input);
        run(input);
    };
    for seed in &seeds {
        run(seed);
    }
    let mut random = Rng::with_seed(1);
    for _ in 0..mutations {
        let mut input = seeds[random.usize(..seeds.len())].clone();
        for _ in 0..random.usize(1..4) {
            mutate(&mut input, &seeds, &mut random);
        }
        run(&input);
    }
}

/// Changes the input at one place.
fn mutate(input: &mut Vec<u8>, seeds: &[Vec<u8>], random: &mut Rng) {
    const SPECIAL_BYTES: &[u8] = b"\0\r\n\t \"'\\,:;=%+-*$[]{}#09AZaz_\x7f\x80\xff";
    let byte = |random: &mut Rng| match random.bool() {
        true => SPECIAL_BYTES[random.usize(..SPECIAL_BYTES.len())],
        false => random.u8(..),
    };
    let (start, end) = {
        let (one, other) = (random.usize(..=input.len()), random.usize(..=input.len()));
        (one.min(other), one.max(other))
    };
    match random.u8(..7) {
        0 => input.insert(start, byte(random)),
        1 if start < input.len() => input[start] = byte(random),
        2 if start < input.len() => input[start] ^= 1 << random.u8(..8),
        3 => drop(input.drain(start..end)),
        4 => {
            let copy = input[start..end].to_vec();
            input.splice(start..start, copy);
        }
        5 => {
            let other = &seeds[random.usize(..seeds.len())];
            let from = random.usize(..=other.len());
            input.splice(start..end, other[from..].iter().copied());
        }
        _ => input.truncate(end),
    }
}

struct PrintOnPanic<'a>(&'a [u8]);

impl Drop for PrintOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            #[expect(clippy::print_stderr, reason = "the input is needed to reproduce the failure")]
            {
                eprintln!("the input was b\"{}\"", self.0.escape_ascii());
            }
        }
    }
}
