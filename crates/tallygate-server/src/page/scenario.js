// The scenario: its fields, its initial values, and how the address stores it.
//
// A number is stored in the unit of the server. `scale` is the number of these units per unit shown. The slider covers the
// usual range, and the field beside it the full range of the server.

export const ALGORITHMS = [
  "token_bucket",
  "leaky_bucket",
  "gcra",
  "fixed_window",
  "sliding_window_log",
  "sliding_window_counter",
];

export const PATTERNS = [
  ["steady", "Steady", "Evenly spaced requests."],
  ["bursty", "Bursty", "Groups of requests at one instant, with pauses between them."],
  ["poisson", "Poisson", "Random gaps, as from many independent clients. The seed sets them."],
  ["ramp", "Ramp", "From zero to twice the rate."],
  [
    "spike",
    "Spike across a boundary",
    "The whole limit just before a window ends, and again just after.",
  ],
  ["retry", "Retrying client", "The client retries each denied request."],
  ["greedy", "One greedy client", "Several clients, one of them greedy. Each has its own quota."],
];

/** The numbers, each with a slider. `only` names the pattern to which a number applies. */
export const NUMBERS = [
  { name: "limit", label: "Limit", unit: "", min: 1, max: 100, most: 1_000_000 },
  { name: "window_ms", label: "Window", unit: "s", scale: 1000, min: 1, max: 60, most: 86_400, step: 0.1 },
  { name: "burst", label: "Burst", unit: "", min: 1, max: 100, most: 1_000_000, hint: "for buckets" },
  { name: "rate_per_minute", label: "Rate", unit: "per minute", min: 1, max: 600, most: 1_000_000 },
  { name: "burst_size", label: "Group size", unit: "", min: 1, max: 50, most: 10_000, only: "bursty" },
  { name: "clients", label: "Normal clients", unit: "", min: 1, max: 15, most: 15, only: "greedy" },
  {
    name: "greedy_factor",
    label: "Greedy client",
    unit: "×",
    min: 1,
    max: 50,
    most: 10_000,
    only: "greedy",
  },
  {
    name: "naive_wait_ms",
    label: "Wait",
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
  { name: "instances", label: "Instances", unit: "", min: 1, max: 16, most: 16, hint: "divide the quota" },
  { name: "seed", label: "Seed", unit: "", min: 1, max: 1000, most: Number.MAX_SAFE_INTEGER },
];

/** The checkboxes. */
export const CHOICES = [
  { name: "obeys", label: "Respect Retry-After", within: "retry", only: "retry" },
  { name: "jitter", label: "Add jitter", within: "retry", only: "retry" },
];

/** Replaces the names of fields in a message of the server by the labels that the user sees. */
export function labeled(message) {
  return message.replace(/`(\w+)`/g, (quoted, name) => {
    const field = [...NUMBERS, ...CHOICES].find((field) => field.name === name);
    return field ? `"${field.label}"` : quoted;
  });
}

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
    instances: 1,
  };
}

/** Returns the value of a field. */
export const read = (scenario, field) => (field.within ? scenario[field.within] : scenario)[field.name];

/** Returns the scenario with another value of a field. */
export function changed(scenario, field, value) {
  if (!field.within) return { ...scenario, [field.name]: value };
  return { ...scenario, [field.within]: { ...scenario[field.within], [field.name]: value } };
}

/** Returns whether a field applies to a scenario. */
export const applies = (scenario, field) =>
  (!field.only || field.only === scenario.pattern) && !(field.unless && scenario.retry[field.unless]);

/** Returns the query of an address: every value that differs from the initial one. */
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

/** Returns the scenario of an address. Invalid and missing values are the initial ones. */
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
