//! A limit as one writes it: in a line, in a configuration, in Rust.

use tallygate_core::Limit;

use super::scenario::MICROS_A_MILLI;
use crate::spelling::Spelled;

/// The spelling of a policy in a line.
pub(super) fn line(limit: &Limit) -> String {
    Spelled::in_micros(limit).to_string()
}

/// A policy of a configuration.
pub(super) fn toml(limit: &Limit) -> String {
    let numbers = limit.numbers();
    let mut toml = format!(
        "[policies.example]\nalgorithm = \"{}\"\nlimit = {}\nwindow = \"{}\"\n",
        numbers.kind,
        numbers.limit,
        Spelled::in_micros(limit).window()
    );
    if numbers.kind.is_bucket() {
        toml.push_str(&format!("burst = {}\n", numbers.burst));
    }
    toml
}

/// An expression of Rust, with the names of the crate `tallygate`.
pub(super) fn rust(limit: &Limit) -> String {
    let numbers = limit.numbers();
    let per = match Spelled::in_micros(limit).window().to_string().as_str() {
        "1s" => ".per_second()".to_owned(),
        "1m" => ".per_minute()".to_owned(),
        "1h" => ".per_hour()".to_owned(),
        "1d" => ".per_day()".to_owned(),
        _ => {
            let millis = numbers.window.0 / MICROS_A_MILLI;
            let duration = match millis % 1000 {
                0 => format!("Duration::from_secs({})", millis / 1000),
                _ => format!("Duration::from_millis({millis})"),
            };
            format!(".per(Ticks::from_duration({duration}))")
        }
    };
    let burst = match numbers.kind.is_bucket() {
        true => format!(".burst({})", numbers.burst),
        false => String::new(),
    };
    format!("Policy::{}({}){per}{burst}.build()?", numbers.kind, numbers.limit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::Scenario;

    #[test]
    fn a_line_has_the_window_in_its_largest_whole_unit() {
        let shown = |window_ms| {
            let scenario = Scenario { window_ms, ..Scenario::default() };
            line(&scenario.limit_of(tallygate_core::Kind::Gcra).unwrap())
        };
        assert_eq!(shown(10_000), "gcra 10/10s burst 10");
        assert_eq!(shown(90_000), "gcra 10/90s burst 10");
        assert_eq!(shown(120_000), "gcra 10/2m burst 10");
        assert_eq!(shown(1_500), "gcra 10/1500ms burst 10");
    }
}
