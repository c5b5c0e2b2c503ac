//! How the time of a check grows with the number of keys, beside others.
//!
//! Prints the numbers, and writes the plot to the path it is given.

use tallygate_bench::entrants::{asked, asked_in_batches};
use tallygate_bench::plot::{Curve, Plot};
use tallygate_bench::rivals::{Governor, Quota, Tallygate, Throttlecrab};
use tallygate_bench::rounds::{Entrant, contest};
use tallygate_bench::workload::{PLENTY, PLENTY_FOR_ONE, Workload, quick};

/// From one key to ten million.
const DECADES: u32 = 8;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("which file shall the plot be written to?")?;
    let mut curves = [
        ("tallygate, batches of 32", "#0969da"),
        ("tallygate", "#1f883d"),
        ("governor", "#cf222e"),
        ("quota", "#9a6700"),
        ("throttlecrab", "#8250df"),
    ]
    .map(|(name, colour)| Curve { name, colour, points: Vec::new() });

    print!("{:>10}", "keys");
    for curve in &curves {
        print!("{:>26}", curve.name);
    }
    println!("   (ns a decision)");
    for decade in 0..DECADES - if quick() { 2 } else { 0 } {
        let clients = 10_usize.pow(decade);
        let workload = Workload::of(clients);
        let limit = if clients < 1000 { PLENTY_FOR_ONE } else { PLENTY };
        let batches = asked_in_batches::<Tallygate>(&workload, limit);
        let bests = contest(vec![
            Entrant { name: "tallygate, batches of 32", ..batches },
            asked::<Tallygate>(&workload, limit, 1),
            asked::<Governor>(&workload, limit, 1),
            asked::<Quota>(&workload, limit, 1),
            asked::<Throttlecrab>(&workload, limit, 1),
        ]);
        print!("{clients:>10}");
        for (curve, best) in curves.iter_mut().zip(bests) {
            assert_eq!(curve.name, best.name);
            curve.points.push((clients as f64, best.ns));
            print!("{:>26.1}", best.ns);
        }
        println!();
    }
    let plot = Plot {
        title: "Nanoseconds a check, one thread, keys at random",
        x: "keys",
        curves: curves.into(),
    };
    std::fs::write(path, plot.svg())?;
    Ok(())
}
