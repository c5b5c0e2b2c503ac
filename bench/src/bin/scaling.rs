//! Measures how the time of a check grows with the number of keys, compared with other limiters.
//!
//! Prints the numbers and writes the plot to the given path.

use tallygate_bench::entrants::{checks, checks_in_batches};
use tallygate_bench::plot::{Curve, Plot};
use tallygate_bench::rivals::{Governor, Quota, Tallygate, Throttlecrab};
use tallygate_bench::rounds::{Entrant, contest};
use tallygate_bench::workload::{PLENTY, PLENTY_FOR_ONE, Workload, quick};

/// From one key to ten million.
const DECADES: u32 = 8;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("expected the path of the plot as the argument")?;
    let mut curves = [
        ("tallygate, batches of 32", "#0969da"),
        ("tallygate", "#1f883d"),
        ("governor", "#cf222e"),
        ("quota", "#9a6700"),
        ("throttlecrab", "#8250df"),
    ]
    .map(|(name, color)| Curve { name, color, points: Vec::new() });

    print!("{:>10}", "keys");
    for curve in &curves {
        print!("{:>26}", curve.name);
    }
    println!("   (ns per decision)");
    for decade in 0..DECADES - if quick() { 2 } else { 0 } {
        let clients = 10_usize.pow(decade);
        let workload = Workload::of(clients);
        let limit = if clients < 1000 { PLENTY_FOR_ONE } else { PLENTY };
        let batches = checks_in_batches::<Tallygate>(&workload, limit);
        let bests = contest(vec![
            Entrant { name: "tallygate, batches of 32", ..batches },
            checks::<Tallygate>(&workload, limit, 1),
            checks::<Governor>(&workload, limit, 1),
            checks::<Quota>(&workload, limit, 1),
            checks::<Throttlecrab>(&workload, limit, 1),
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
        title: "Nanoseconds per check, one thread, random keys",
        x: "keys",
        curves: curves.into(),
    };
    std::fs::write(path, plot.svg())?;
    Ok(())
}
