//! Plots curves as SVG, with a logarithmic x axis and colors for light and dark backgrounds.

use std::fmt::Write as _;

#[derive(Debug)]
pub struct Curve {
    pub name: &'static str,
    pub color: &'static str,
    pub points: Vec<(f64, f64)>,
}

#[derive(Debug)]
pub struct Plot {
    pub title: &'static str,
    pub x: &'static str,
    pub curves: Vec<Curve>,
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 50.0;
const RIGHT: f64 = 570.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 350.0;

/// The smallest distance between the names of curves.
const LINE: f64 = 15.0;

impl Plot {
    pub fn svg(&self) -> String {
        let points = || self.curves.iter().flat_map(|curve| &curve.points);
        let decades = points().map(|point| point.0.log10()).fold(1.0, f64::max);
        let highest = points().map(|point| point.1).fold(1.0, f64::max);
        let step = step(highest);
        let top = (highest / step).ceil() * step;
        let x = |value: f64| LEFT + (RIGHT - LEFT) * value.log10() / decades;
        let y = |value: f64| BOTTOM - (BOTTOM - TOP) * value / top;

        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n\
             <style>text{{fill:#57606a}}line{{stroke:#d0d7de}}@media(prefers-color-scheme:dark)\
             {{text{{fill:#9da7b1}}line{{stroke:#3d444d}}}}</style>\n"
        );
        let mut add = |line: std::fmt::Arguments<'_>| {
            writeln!(svg, "{line}").expect("writing to a string succeeds")
        };
        add(format_args!("<text x=\"{LEFT}\" y=\"20\" font-size=\"14\">{}</text>", self.title));
        for tick in (0..).map(|tick| f64::from(tick) * step).take_while(|tick| *tick <= top) {
            let at = y(tick);
            add(format_args!("<line x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>"));
            let (x, y) = (LEFT - 6.0, at + 4.0);
            add(format_args!("<text x=\"{x}\" y=\"{y:.1}\" text-anchor=\"end\">{tick}</text>"));
        }
        let tens = (0..).map(|decade| 10_f64.powi(decade));
        let twos = (0..).map(|doubling| 2_f64.powi(doubling));
        let names = ["1", "10", "100", "1k", "10k", "100k", "1M", "10M"].map(str::to_owned);
        let ticks: Vec<(f64, String)> = match decades < 2.0 {
            true => twos.take(7).map(|value| (value, format!("{value}"))).collect(),
            false => tens.zip(names).collect(),
        };
        for (value, name) in ticks {
            if value.log10() <= decades {
                let (x, y) = (x(value), BOTTOM + 18.0);
                add(format_args!(
                    "<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{name}</text>"
                ));
            }
        }
        let (middle, below) = (f64::midpoint(LEFT, RIGHT), BOTTOM + 38.0);
        add(format_args!(
            "<text x=\"{middle}\" y=\"{below}\" text-anchor=\"middle\">{}</text>",
            self.x
        ));

        let mut ends: Vec<(&Curve, f64)> = self
            .curves
            .iter()
            .filter_map(|curve| Some((curve, y(curve.points.last()?.1))))
            .collect();
        ends.sort_by(|one, other| other.1.total_cmp(&one.1));
        let mut above = BOTTOM + LINE;
        for (curve, end) in ends {
            let color = curve.color;
            let path: Vec<String> = curve
                .points
                .iter()
                .map(|point| format!("{:.1},{:.1}", x(point.0), y(point.1)))
                .collect();
            let path = path.join(" ");
            add(format_args!(
                "<polyline points=\"{path}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"/>"
            ));
            above = end.min(above - LINE);
            let (x, y) = (RIGHT + 8.0, above + 4.0);
            add(format_args!(
                "<text x=\"{x}\" y=\"{y:.1}\" style=\"fill:{color}\">{}</text>",
                curve.name
            ));
        }
        svg.push_str("</svg>\n");
        svg
    }
}

/// Returns a round distance between grid lines that gives four to ten of them.
fn step(highest: f64) -> f64 {
    let decade = 10_f64.powf((highest / 4.0).log10().floor());
    [5.0, 2.0, 1.0]
        .map(|part| part * decade)
        .into_iter()
        .find(|step| highest / step >= 4.0)
        .unwrap_or(decade)
}
