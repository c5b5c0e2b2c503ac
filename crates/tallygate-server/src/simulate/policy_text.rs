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
    use std::path::Path;

    use tallygate::Access;
    use tallygate_core::{Policy, Ticks};

    use super::*;
    use crate::config::Config;
    use crate::simulate::Scenario;

    #[test]
    fn the_configuration_is_one_and_means_the_same() {
        for window_ms in [1, 999, 1000, 1500, 60_000, 90_000, 3_600_000, 86_400_000] {
            let scenario = Scenario { limit: 7, burst: 9, window_ms, ..Scenario::default() };
            for &kind in &scenario.algorithms {
                let limit = scenario.limit_of(kind).unwrap();
                let config = Config::parse(&toml(&limit), Path::new("")).expect("a configuration");
                let Access::Limited(policy) = config.policies["example"].tiers.base() else {
                    panic!("it limits nothing: {config:?}");
                };
                let written = *policy.limits()[0].numbers();
                // There a tick is a nanosecond.
                let meant = Policy::of(kind, 7).per(Ticks(window_ms * 1_000_000));
                let meant = if kind.is_bucket() { meant.burst(9) } else { meant };
                assert_eq!(written, *meant.limit().unwrap().numbers());
            }
        }
    }

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
