// Times and numbers as people read them.

const US_PER_SECOND = 1_000_000;

/** Formats microseconds for an axis, with as many digits as the step between two labels needs. */
export function axisTime(us, stepUs) {
  if (stepUs >= 60 * US_PER_SECOND) return `${trimmed(us / (60 * US_PER_SECOND), 2)} min`;
  if (stepUs >= US_PER_SECOND / 10) return `${trimmed(us / US_PER_SECOND, 1)} s`;
  if (stepUs >= 1000) return `${trimmed(us / 1000, 0)} ms`;
  return `${us} µs`;
}

/** Formats a time since the start: `3.250 s`. */
export function clock(us) {
  return `${(us / US_PER_SECOND).toFixed(3)} s`;
}

/** Formats a duration in microseconds: `800 ms`, `1.25 s`, `2 min 5 s`. */
export function span(us) {
  if (us === null || us === undefined) return "never";
  if (us === 0) return "0 s";
  if (us < 1000) return `${us} µs`;
  if (us < US_PER_SECOND) return `${trimmed(us / 1000, 3)} ms`;
  if (us < 60 * US_PER_SECOND) return `${trimmed(us / US_PER_SECOND, 3)} s`;
  const seconds = us / US_PER_SECOND;
  const minutes = Math.floor(seconds / 60);
  const rest = trimmed(seconds - 60 * minutes, 1);
  return rest === "0" ? `${minutes} min` : `${minutes} min ${rest} s`;
}

/** Formats whole seconds in the largest unit that divides them: `15 s`, `5 min`, `6 h`, `1 d`. */
export function wholeSpan(seconds) {
  const [length, unit] = [
    [86_400, "d"],
    [3600, "h"],
    [60, "min"],
    [1, "s"],
  ].find(([length]) => seconds % length === 0);
  return `${seconds / length} ${unit}`;
}

/** Formats a measured duration in seconds, with two significant digits. */
export function measured(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const [value, unit] =
    seconds < 1e-3 ? [seconds * 1e6, "µs"] : seconds < 1 ? [seconds * 1e3, "ms"] : [seconds, "s"];
  return `${value < 10 ? value.toFixed(1) : Math.round(value)} ${unit}`;
}

export function trimmed(value, digits) {
  return value.toFixed(digits).replace(/\.?0+$/, (zeros, at, whole) => (whole.includes(".") ? "" : zeros));
}

/** Formats a count, with digits in groups of three. */
export const count = (value) => Number(value).toLocaleString("en").replaceAll(",", " ");

/** Formats a rate per second. */
export const rate = (value) => (value >= 100 ? count(Math.round(value)) : trimmed(value, 1));

/**
 * Formats a share in percent, with three decimals below 1 % and one above. A share above 0 is never shown as 0, and a share
 * below 100 % is never shown as 100 %.
 */
export function percent(part, whole) {
  if (!(whole > 0)) return "–";
  if (part === 0 || part === whole) return part === 0 ? "0 %" : "100 %";
  const share = (100 * part) / whole;
  if (share < 0.001) return "< 0.001 %";
  if (share > 99.9) return share > 99.999 ? "> 99.999 %" : `${trimmed(share, 3)} %`;
  return share < 1 ? `${trimmed(share, 3)} %` : `${share.toFixed(1)} %`;
}

const NAMES = {
  token_bucket: "Token bucket",
  leaky_bucket: "Leaky bucket",
  fixed_window: "Fixed window",
  sliding_window_log: "Sliding window log",
  sliding_window_counter: "Sliding window counter",
  gcra: "GCRA",
};

/** Returns the name of an algorithm for display. */
export const algorithmName = (algorithm) => NAMES[algorithm] ?? algorithm;
