//! Writes a limit as one line, as TOML configuration and as Rust code.

use tallygate_core::Limit;

use super::scenario::MICROS_PER_MILLI;
use crate::limit_syntax::LimitText;

/// Returns a limit in the one-line limit syntax.
pub(super) fn line(limit: &Limit) -> String {
    LimitText::in_micros(limit).to_string()
}

/// Returns a limit as a policy of a configuration file, for each of several instances.
pub(super) fn toml(limit: &Limit, instances: u64) -> String {
    let numbers = limit.numbers();
    let mut toml = format!(
        "[policies.example]\nalgorithm = \"{}\"\nlimit = {}\nwindow = \"{}\"\n",
        numbers.kind,
        numbers.limit,
        LimitText::in_micros(limit).window()
    );
    if numbers.kind.is_bucket() {
        toml.push_str(&format!("burst = {}\n", numbers.burst));
    }
    if instances > 1 {
        toml.push_str(&format!("instances = {instances}\n"));
    }
    toml
}

/// Returns a limit as a Rust expression that uses the crate `tallygate`, for the first of several instances.
pub(super) fn rust(limit: &Limit, instances: u64) -> String {
    let numbers = limit.numbers();
    let per = match LimitText::in_micros(limit).window().to_string().as_str() {
        "1s" => ".per_second()".to_owned(),
        "1m" => ".per_minute()".to_owned(),
        "1h" => ".per_hour()".to_owned(),
        "1d" => ".per_day()".to_owned(),
        _ => {
            let millis = numbers.window.0 / MICROS_PER_MILLI;
            let duration = match millis % 1000 {
                0 => format!("Duration::from_secs({})", millis / 1000),
                _ => format!("Duration::from_millis({millis})"),
            };
            format!(".per({duration})")
        }
    };
    let burst = match numbers.kind.is_bucket() {
        true => format!(".burst({})", numbers.burst),
        false => String::new(),
    };
    let share = match instances {
        1 => String::new(),
        count => format!(".share(Instance {{ index: 0, count: {count} }})?"),
    };
    format!("Policy::{}({}){per}{burst}.build()?{share}", numbers.kind, numbers.limit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::Scenario;

    #[test]
    fn the_window_is_shown_in_the_largest_whole_unit() {
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
