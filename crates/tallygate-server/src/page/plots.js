// The plots: uPlot with the page's colours, and what a lane draws with it.
//
// Times are microseconds of virtual time, as the server tells them: what a plot holds is what came, number for number.

import { axisTime, count, trimmed } from "./units.js";

const GUTTER = 52;
const RIGHT = 18;
/** Room above a plot for its name. */
const NAMED = [19, RIGHT, 0, 0];
const styles = getComputedStyle(document.documentElement);

/** A colour of the style sheet, as it is now: it differs by theme. */
export const colour = (name) => styles.getPropertyValue(`--${name}`).trim();

const font = () => `11px ${styles.getPropertyValue("--sans")}`;

const xAxis = (isShown) => ({
  stroke: () => colour("muted"),
  font: font(),
  size: isShown ? 24 : 0,
  gap: 3,
  space: 64,
  grid: { stroke: () => colour("grid"), width: 1 },
  ticks: { show: isShown, stroke: () => colour("grid"), width: 1, size: 4 },
  values: isShown ? (_, splits) => splits.map((us) => axisTime(us, (splits[1] ?? us) - splits[0])) : () => [],
});

const yAxis = (values = (_, splits) => splits.map((value) => shortened(value))) => ({
  stroke: () => colour("muted"),
  font: font(),
  size: GUTTER,
  gap: 4,
  space: 26,
  grid: { stroke: () => colour("grid"), width: 1 },
  ticks: { show: false },
  values,
});

function shortened(value) {
  if (Math.abs(value) >= 1_000_000) return `${trimmed(value / 1_000_000, 1)}M`;
  if (Math.abs(value) >= 10_000) return `${trimmed(value / 1000, 1)}k`;
  return count(value);
}

function plot(into, height, options, data) {
  return new uPlot(
    {
      width: Math.max(into.clientWidth, 80),
      height,
      padding: [4, RIGHT, 0, 0],
      legend: { show: false },
      cursor: { show: false },
      ...options,
    },
    data,
    into,
  );
}

/** Where a plot's area begins and ends, as parts of the page's own boxes: the veil and the marks are put there. */
export const AREA = { left: GUTTER, right: RIGHT };

/** How high the decisions of so many clients are. */
export const decisionsHeight = (clients) => Math.max(40, 16 * clients);

/**
 * The decisions of a lane: up and filled if allowed, down with a foot if refused, so that shape tells as colour does.
 * Each client has a row. `lane()` is the lane that is drawn, `windowUs()` how long its window is.
 */
export function decisions(into, lane, windowUs) {
  const draw = (u) => {
    const { ctx } = u;
    const dpr = devicePixelRatio;
    const { at_us, allowed, client } = lane().events;
    const rows = Math.max(1, lane().clients.length);
    const { left, top, width, height } = u.bbox;
    const row = height / rows;
    ctx.save();
    if (rows > 1) {
      ctx.font = `${10 * dpr}px ${styles.getPropertyValue("--sans")}`;
      ctx.textAlign = "right";
      ctx.textBaseline = "middle";
      ctx.fillStyle = colour("muted");
      lane().clients.forEach(({ name }, index) =>
        ctx.fillText(name, left - 5 * dpr, top + row * (index + 0.5)),
      );
    }
    ctx.beginPath();
    ctx.rect(left, top - 1, width, height + 2);
    ctx.clip();
    const worst = lane().worst_window;
    if (worst && worst.count > 0) {
      const from = u.valToPos(worst.from_us, "x", true);
      const to = u.valToPos(worst.from_us + windowUs(), "x", true);
      ctx.fillStyle = colour(worst.count > lane().limit ? "over-wash" : "wash");
      ctx.fillRect(from, top, to - from, height);
    }
    ctx.strokeStyle = colour("grid");
    ctx.lineWidth = dpr;
    ctx.beginPath();
    for (let index = 0; index < rows; index += 1) {
      const middle = Math.round(top + row * (index + 0.5)) + 0.5;
      ctx.moveTo(left, middle);
      ctx.lineTo(left + width, middle);
    }
    ctx.stroke();
    const thick = Math.max(1, Math.min(2, width / dpr / Math.max(1, at_us.length) / 1.6)) * dpr;
    const foot = at_us.length > width / dpr ? 0 : Math.min(3, row / dpr / 6) * dpr;
    for (const kind of [1, 0]) {
      ctx.strokeStyle = colour(kind ? "allowed" : "refused");
      ctx.lineWidth = thick;
      ctx.beginPath();
      for (let index = 0; index < at_us.length; index += 1) {
        if (allowed[index] !== kind) continue;
        const x = u.valToPos(at_us[index], "x", true);
        const middle = top + row * (client[index] + 0.5);
        const reach = row * (kind ? 0.44 : 0.38);
        ctx.moveTo(x, middle);
        ctx.lineTo(x, kind ? middle - reach : middle + reach);
        if (!kind && foot > 0) {
          ctx.moveTo(x - foot, middle + reach - foot);
          ctx.lineTo(x + foot, middle + reach + foot);
          ctx.moveTo(x + foot, middle + reach - foot);
          ctx.lineTo(x - foot, middle + reach + foot);
        }
      }
      ctx.stroke();
    }
    ctx.restore();
  };
  return plot(
    into,
    decisionsHeight(1),
    {
      scales: { x: { time: false, range: () => [0, lane().duration_us] }, y: { range: () => [0, 1] } },
      axes: [xAxis(false), { ...yAxis(() => []), grid: { show: false } }],
      series: [{}, { paths: () => null, points: { show: false } }],
      hooks: { draw: [draw] },
    },
    [[], []],
  );
}

/** The inner state of a lane over time, with the line it cannot pass. */
export function state(into, lane) {
  const capacity = (u) => rule(u, lane().state.capacity, "limit-line");
  return plot(
    into,
    90,
    {
      padding: NAMED,
      scales: {
        x: { time: false, range: () => [0, lane().duration_us] },
        y: {
          range: (u, least, most) => [
            Math.min(0, least ?? 0),
            Math.max(lane().state.capacity ?? 1, most ?? 1) * 1.08,
          ],
        },
      },
      axes: [xAxis(true), yAxis()],
      series: [
        {},
        {
          stroke: () => colour("state"),
          fill: () => colour("state-wash"),
          width: 1.5,
          points: { show: false },
        },
      ],
      hooks: { drawClear: [capacity] },
    },
    [[], []],
  );
}

/** What was admitted so far, against what was offered and the ideal line. */
export function cumulative(into, lane) {
  const others = (u) => {
    path(u, lane().offered, "offered", [2, 3]);
    path(u, lane().ideal, "limit-line", [6, 4]);
  };
  const highest = () => Math.max(1, last(lane().cumulative.value), last(lane().ideal.value), 0);
  return plot(
    into,
    130,
    {
      padding: NAMED,
      scales: {
        x: { time: false, range: () => [0, lane().duration_us] },
        y: { range: () => [0, highest() * 1.08] },
      },
      axes: [xAxis(true), yAxis()],
      series: [{}, { stroke: () => colour("allowed"), width: 2, points: { show: false } }],
      hooks: { drawClear: [others] },
    },
    [[], []],
  );
}

const last = (list) => list[list.length - 1] ?? 0;

function rule(u, value, name) {
  if (value === null || value === undefined) return;
  path(u, { at_us: [u.scales.x.min, u.scales.x.max], value: [value, value] }, name, [6, 4]);
}

function path(u, { at_us, value }, name, dash) {
  const { ctx } = u;
  ctx.save();
  ctx.beginPath();
  ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
  ctx.clip();
  ctx.beginPath();
  ctx.strokeStyle = colour(name);
  ctx.lineWidth = 1.25 * devicePixelRatio;
  ctx.setLineDash(dash.map((length) => length * devicePixelRatio));
  at_us.forEach((at, index) => {
    const x = u.valToPos(at, "x", true);
    const y = u.valToPos(value[index], "y", true);
    if (index === 0) ctx.moveTo(x, y);
    else ctx.lineTo(x, y);
  });
  ctx.stroke();
  ctx.restore();
}

/** An axis of the time of day. */
const dayAxis = () => ({
  ...xAxis(true),
  space: 80,
  values: (u, splits) => splits.map((at) => timeOfDay(at, u.scales.x.max - u.scales.x.min)),
});

const DAY_S = 86_400;

function timeOfDay(at, range) {
  const date = new Date(at * 1000);
  const time = date.toLocaleTimeString("en-GB");
  return range > DAY_S ? `${date.toISOString().slice(5, 10)} ${time.slice(0, 5)}` : time;
}

/** Lines over the time of day, from 0 up. */
function lines(into, series, axis) {
  return plot(
    into,
    220,
    {
      scales: { x: { time: true }, y: { range: (u, least, most) => [0, Math.max(1, most ?? 1) * 1.1] } },
      axes: [axis, yAxis()],
      series: [
        {},
        ...series.map(({ isDashed, hue }) => ({
          stroke: () => colour(`hue-${hue}`),
          width: 2,
          dash: isDashed ? [5, 4] : undefined,
          points: { show: false },
        })),
      ],
    },
    [[], ...series.map(() => [])],
  );
}

/** What is live: a line for each policy and outcome. */
export const live = (into, series) =>
  lines(
    into,
    series.map(({ outcome, hue }) => ({ isDashed: outcome === "refused", hue })),
    dayAxis(),
  );

/** What a backtest counted in steps of time: requests, and refusals by policy. */
export function overTime(into, { over_time: { points }, policies }) {
  const series = [
    { isDashed: false, hue: 0 },
    ...policies.map((_, index) => ({ isDashed: true, hue: (index + 1) % 6 })),
  ];
  const plot = lines(into, series, dayAxis());
  plot.setData([
    points.map(({ time }) => Date.parse(time) / 1000),
    points.map(({ requests }) => requests),
    ...policies.map((_, index) => points.map(({ refused }) => refused[index])),
  ]);
  return plot;
}
