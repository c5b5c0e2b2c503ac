// Times and numbers as people read them.

const US_A_SECOND = 1_000_000;

/** Microseconds on an axis: seconds, with as many digits as the step between two marks needs. */
export function axisTime(us, stepUs) {
  if (stepUs >= 60 * US_A_SECOND) return `${trimmed(us / (60 * US_A_SECOND), 2)} min`;
  if (stepUs >= US_A_SECOND / 10) return `${trimmed(us / US_A_SECOND, 1)} s`;
  if (stepUs >= 1000) return `${trimmed(us / 1000, 0)} ms`;
  return `${us} µs`;
}

/** A time on a clock that starts at 0: `3.250 s`. */
export function clock(us) {
  return `${(us / US_A_SECOND).toFixed(3)} s`;
}

/** A span of microseconds, exact where it is short: `800 ms`, `1.25 s`, `2 min 5 s`. */
export function span(us) {
  if (us === null || us === undefined) return "never";
  if (us === 0) return "0 s";
  if (us < 1000) return `${us} µs`;
  if (us < US_A_SECOND) return `${trimmed(us / 1000, 3)} ms`;
  if (us < 60 * US_A_SECOND) return `${trimmed(us / US_A_SECOND, 3)} s`;
  const seconds = us / US_A_SECOND;
  const minutes = Math.floor(seconds / 60);
  const rest = trimmed(seconds - 60 * minutes, 1);
  return rest === "0" ? `${minutes} min` : `${minutes} min ${rest} s`;
}

/** A span of seconds that were measured, as well as a histogram tells. */
export function measured(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const [value, unit] =
    seconds < 1e-3 ? [seconds * 1e6, "µs"] : seconds < 1 ? [seconds * 1e3, "ms"] : [seconds, "s"];
  return `${value < 10 ? value.toFixed(1) : Math.round(value)} ${unit}`;
}

export function trimmed(value, digits) {
  return value.toFixed(digits).replace(/\.?0+$/, (zeros, at, whole) => (whole.includes(".") ? "" : zeros));
}

/** A count, in groups of three. */
export const count = (value) => Number(value).toLocaleString("en").replaceAll(",", " ");

/** A rate a second. */
export const rate = (value) => (value >= 100 ? count(Math.round(value)) : trimmed(value, 1));

/** A part of a whole, in percent. */
export const percent = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "–");

const NAMES = {
  token_bucket: "Token bucket",
  leaky_bucket: "Leaky bucket",
  fixed_window: "Fixed window",
  sliding_window_log: "Sliding window log",
  sliding_window_counter: "Sliding window counter",
  gcra: "GCRA",
};

/** The name of an algorithm. */
export const algorithmName = (algorithm) => NAMES[algorithm] ?? algorithm;
