// The scenario: what can be said of it, what the page begins with, and how it stands in the address.
//
// A number is kept as the server takes it; `scale` is how many of the server's units make one of those shown. The
// slider covers what is often wanted, the field beside it everything that the server may take.

export const ALGORITHMS = [
  "token_bucket",
  "leaky_bucket",
  "gcra",
  "fixed_window",
  "sliding_window_log",
  "sliding_window_counter",
];

export const PATTERNS = [
  ["steady", "Steady", "Evenly spaced."],
  ["bursty", "Bursty", "Groups at one instant, with pauses between."],
  ["poisson", "Poisson", "Independent clients: gaps by chance, from the seed."],
  ["ramp", "Ramp", "From nothing to twice the rate."],
  [
    "spike",
    "Spike across a boundary",
    "The whole limit just before a window ends, and once more just after.",
  ],
  ["retry", "A client that retries", "Each refused request comes again."],
  ["greedy", "Several clients, one greedy", "Each has an allowance of its own."],
];

/** What is dragged. `only` says with which pattern. */
export const NUMBERS = [
  { name: "limit", label: "Limit", unit: "", min: 1, max: 100, most: 1_000_000 },
  { name: "window_ms", label: "Window", unit: "s", scale: 1000, min: 1, max: 60, most: 86_400, step: 0.1 },
  { name: "burst", label: "Burst", unit: "", min: 1, max: 100, most: 1_000_000, hint: "for buckets" },
  { name: "rate_per_minute", label: "Incoming", unit: "a minute", min: 1, max: 600, most: 1_000_000 },
  { name: "burst_size", label: "Group", unit: "", min: 1, max: 50, most: 10_000, only: "bursty" },
  { name: "clients", label: "Polite clients", unit: "", min: 1, max: 15, most: 15, only: "greedy" },
  {
    name: "greedy_factor",
    label: "The greedy one",
    unit: "×",
    min: 1,
    max: 50,
    most: 10_000,
    only: "greedy",
  },
  {
    name: "naive_wait_ms",
    label: "Waits",
    unit: "ms",
    min: 10,
    max: 2000,
    most: 3_600_000,
    within: "retry",
    only: "retry",
    unless: "obeys",
  },
  {
    name: "attempts",
    label: "Attempts",
    unit: "",
    min: 1,
    max: 20,
    most: 100,
    within: "retry",
    only: "retry",
  },
  { name: "duration_ms", label: "Duration", unit: "s", scale: 1000, min: 5, max: 120, most: 86_400, step: 1 },
  { name: "cost", label: "Cost", unit: "", min: 1, max: 20, most: 1_000_000 },
  { name: "seed", label: "Seed", unit: "", min: 1, max: 1000, most: Number.MAX_SAFE_INTEGER },
];

/** What is ticked. */
export const CHOICES = [
  { name: "obeys", label: "Obeys Retry-After", within: "retry", only: "retry" },
  { name: "jitter", label: "With jitter", within: "retry", only: "retry" },
];

export function first() {
  return {
    limit: 10,
    window_ms: 10_000,
    burst: 10,
    algorithms: ALGORITHMS,
    pattern: "spike",
    rate_per_minute: 90,
    duration_ms: 30_000,
    seed: 1,
    cost: 1,
    retry: { obeys: true, jitter: true, naive_wait_ms: 200, attempts: 5 },
    clients: 3,
    greedy_factor: 20,
    burst_size: 8,
  };
}

/** A value of a scenario, wherever it stands. */
export const read = (scenario, field) => (field.within ? scenario[field.within] : scenario)[field.name];

/** A scenario with another value. */
export function changed(scenario, field, value) {
  if (!field.within) return { ...scenario, [field.name]: value };
  return { ...scenario, [field.within]: { ...scenario[field.within], [field.name]: value } };
}

/** Whether a field means anything with a scenario. */
export const applies = (scenario, field) =>
  (!field.only || field.only === scenario.pattern) && !(field.unless && scenario.retry[field.unless]);

/** As it stands in the address: whatever is not as the page begins. */
export function toQuery(scenario) {
  const usual = first();
  const query = new URLSearchParams();
  if (scenario.pattern !== usual.pattern) query.set("pattern", scenario.pattern);
  for (const field of [...NUMBERS, ...CHOICES]) {
    const value = read(scenario, field);
    if (value !== read(usual, field)) query.set(field.name, value);
  }
  return query.toString();
}

/** What the address says; what it says wrongly is as the page begins. */
export function fromQuery(text) {
  const query = new URLSearchParams(text);
  let scenario = first();
  if (PATTERNS.some(([name]) => name === query.get("pattern"))) scenario.pattern = query.get("pattern");
  for (const field of NUMBERS) {
    const given = query.get(field.name);
    if (given !== null && /^\d{1,16}$/.test(given)) scenario = changed(scenario, field, Number(given));
  }
  for (const field of CHOICES) {
    const given = query.get(field.name);
    if (given === "true" || given === "false") scenario = changed(scenario, field, given === "true");
  }
  return scenario;
}
