// Parses the metrics of the server, which are in the text format of Prometheus.

/** Returns the samples of a text: `{ name, labels, value }`. */
export function parse(text) {
  return text
    .split("\n")
    .filter((line) => line && !line.startsWith("#"))
    .map(sample);
}

function sample(line) {
  const labels = {};
  const brace = line.indexOf("{");
  const space = line.indexOf(" ");
  if (brace < 0 || space < brace)
    return { name: line.slice(0, space), labels, value: Number(line.slice(space + 1)) };
  let at = brace + 1;
  while (line[at] !== "}") {
    const equals = line.indexOf("=", at);
    const name = line.slice(at, equals);
    let value = "";
    // From the opening quote to the closing quote.
    for (at = equals + 2; line[at] !== '"'; at += 1) {
      if (line[at] === "\\") {
        at += 1;
        value += line[at] === "n" ? "\n" : line[at];
      } else {
        value += line[at];
      }
    }
    labels[name] = value;
    at += 1;
    if (line[at] === ",") at += 1;
  }
  return { name: line.slice(0, brace), labels, value: Number(line.slice(at + 2)) };
}

export const sum = (samples, name, labels = {}) =>
  select(samples, name, labels).reduce((total, { value }) => total + value, 0);

export const select = (samples, name, labels = {}) =>
  samples.filter(
    (sample) =>
      sample.name === name &&
      Object.entries(labels).every(([label, value]) => sample.labels[label] === value),
  );

/**
 * Estimates a quantile of the observations between two readings, by interpolation within its histogram bucket. Returns
 * `null` if there were no observations. A quantile above the last bound is that bound.
 */
export function quantile(part, before, now, name, labels) {
  const buckets = new Map();
  for (const [samples, sign] of [
    [now, 1],
    [before, -1],
  ]) {
    for (const {
      labels: { le },
      value,
    } of select(samples, `${name}_bucket`, labels)) {
      const bound = le === "+Inf" ? Infinity : Number(le);
      buckets.set(bound, (buckets.get(bound) ?? 0) + sign * value);
    }
  }
  const sorted = [...buckets].sort(([one], [other]) => one - other);
  const total = sorted.length ? sorted[sorted.length - 1][1] : 0;
  if (total <= 0) return null;
  const wanted = part * total;
  let [lower, below] = [0, 0];
  for (const [bound, upTo] of sorted) {
    if (upTo >= wanted) {
      return bound === Infinity
        ? lower
        : lower + ((bound - lower) * (wanted - below)) / Math.max(1, upTo - below);
    }
    [lower, below] = [bound, upTo];
  }
  return lower;
}
