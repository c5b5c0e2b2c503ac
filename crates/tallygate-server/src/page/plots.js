// The plots: uPlot with the colors of the page.
//
// Times are microseconds of virtual time. A plot holds the numbers of the server's response unchanged.

import { axisTime, count, trimmed } from "./units.js";

const GUTTER = 52;
const RIGHT = 18;
/** The same for a plot over the time of day: half of its longest label, which a tick at the edge needs. */
const RIGHT_OF_DAY = 34;
/** Room above a plot for its name. */
const NAMED = [19, RIGHT, 0, 0];
const styles = getComputedStyle(document.documentElement);

/** Returns a color of the style sheet in the current theme. */
export const color = (name) => styles.getPropertyValue(`--${name}`).trim();

const font = () => `11px ${styles.getPropertyValue("--sans")}`;

const xAxis = (isShown) => ({
  stroke: () => color("muted"),
  font: font(),
  size: isShown ? 24 : 0,
  gap: 3,
  space: 64,
  grid: { stroke: () => color("grid"), width: 1 },
  ticks: { show: isShown, stroke: () => color("grid"), width: 1, size: 4 },
  values: isShown ? (_, splits) => splits.map((us) => axisTime(us, (splits[1] ?? us) - splits[0])) : () => [],
});

const yAxis = (values = (_, splits) => splits.map((value) => shortened(value))) => ({
  stroke: () => color("muted"),
  font: font(),
  size: GUTTER,
  gap: 4,
  space: 26,
  grid: { stroke: () => color("grid"), width: 1 },
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

/** The distance from the left and right edge of a plot to its drawing area, for the veil and the marks. */
export const AREA = { left: GUTTER, right: RIGHT };

/** Returns the height of the decisions of a number of clients. */
export const decisionsHeight = (clients) => Math.max(40, 16 * clients);

/**
 * Plots the decisions of a lane at their arrival, one row per client. Allowed requests point up, denied ones point down and
 * end in a cross, so that they differ in shape and not only in color. `lane()` returns the lane to draw.
 */
export function decisions(into, lane) {
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
      lane().clients.forEach(({ name }, index) => {
        ctx.fillStyle = color(index === lane().shownClient ? "text" : "muted");
        ctx.fillText(name, left - 5 * dpr, top + row * (index + 0.5));
      });
    } else {
      gutterText(u, "arrive");
    }
    ctx.beginPath();
    ctx.rect(left, top - 1, width, height + 2);
    ctx.clip();
    const worst = lane().worst_window;
    if (worst && worst.count > 0) {
      const from = u.valToPos(worst.from_us, "x", true);
      const to = u.valToPos(worst.from_us + lane().window_us, "x", true);
      ctx.fillStyle = color(worst.count > lane().limit ? "over-wash" : "wash");
      ctx.fillRect(from, top, to - from, height);
    }
    ctx.strokeStyle = color("grid");
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
      ctx.strokeStyle = color(kind ? "allowed" : "denied");
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

/** Writes a word beside a plot. */
function gutterText(u, text) {
  const { ctx } = u;
  const { left, top, height } = u.bbox;
  ctx.save();
  ctx.font = `${10 * devicePixelRatio}px ${styles.getPropertyValue("--sans")}`;
  ctx.textAlign = "right";
  ctx.textBaseline = "middle";
  ctx.fillStyle = color("muted");
  ctx.fillText(text, left - 5 * devicePixelRatio, top + height / 2);
  ctx.restore();
}

/** The height of the departures. */
export const DEPARTURES_HEIGHT = 26;

/** Plots each allowed request of the shown client at the time at which it leaves: its arrival plus its delay. */
export function departures(into, lane) {
  const draw = (u) => {
    gutterText(u, "leave");
    const { ctx } = u;
    const { left, top, width, height } = u.bbox;
    const { departures_us } = lane();
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, top - 1, width, height + 2);
    ctx.clip();
    ctx.strokeStyle = color("grid");
    ctx.lineWidth = devicePixelRatio;
    ctx.beginPath();
    ctx.moveTo(left, Math.round(top + height) - 0.5);
    ctx.lineTo(left + width, Math.round(top + height) - 0.5);
    ctx.stroke();
    const spacing = width / devicePixelRatio / Math.max(1, departures_us.length);
    ctx.strokeStyle = color("departed");
    ctx.lineWidth = Math.max(1, Math.min(2.5, spacing / 1.6)) * devicePixelRatio;
    ctx.beginPath();
    for (const at of departures_us) {
      const x = u.valToPos(at, "x", true);
      ctx.moveTo(x, top + height);
      ctx.lineTo(x, top + height * 0.12);
    }
    ctx.stroke();
    ctx.restore();
  };
  return plot(
    into,
    DEPARTURES_HEIGHT,
    {
      scales: { x: { time: false, range: () => [0, lane().duration_us] }, y: { range: () => [0, 1] } },
      axes: [xAxis(false), { ...yAxis(() => []), grid: { show: false } }],
      series: [{}, { paths: () => null, points: { show: false } }],
      hooks: { draw: [draw] },
    },
    [[], []],
  );
}

/** Plots the inner state of the shown client over time, with its largest value as a dashed line. */
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
          stroke: () => color("state"),
          fill: () => color("state-wash"),
          width: 1.5,
          points: { show: false },
        },
      ],
      hooks: { drawClear: [capacity] },
    },
    [[], []],
  );
}

/**
 * Plots the units of the shown client that have departed so far (thick), were allowed (thin) and were requested, and the
 * most that a bucket allows. The area between allowed and left is filled: these requests wait.
 */
export function cumulative(into, lane) {
  const others = (u) => {
    queue(u, lane());
    path(u, lane().offered, "offered", [2, 3]);
    path(u, lane().ideal, "limit-line", [6, 4]);
    path(u, lane().cumulative, "allowed", []);
  };
  const highest = () => Math.max(1, last(lane().cumulative.value), last(lane().ideal.value));
  return plot(
    into,
    156,
    {
      padding: NAMED,
      scales: {
        x: { time: false, range: () => [0, lane().duration_us] },
        y: { range: () => [0, highest() * 1.08] },
      },
      axes: [xAxis(true), yAxis()],
      series: [{}, { stroke: () => color("departed"), width: 2.5, points: { show: false } }],
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

/** Fills the area between the allowed units and the departed units. */
function queue(u, { cumulative, departures }) {
  const { ctx } = u;
  const corners = ({ at_us, value }) =>
    at_us.map((at, index) => [u.valToPos(at, "x", true), u.valToPos(value[index], "y", true)]);
  ctx.save();
  ctx.beginPath();
  for (const [x, y] of [...corners(cumulative), ...corners(departures).reverse()]) ctx.lineTo(x, y);
  ctx.fillStyle = color("queue-wash");
  ctx.fill();
  ctx.restore();
}

function path(u, { at_us, value }, name, dash) {
  const { ctx } = u;
  ctx.save();
  ctx.beginPath();
  ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
  ctx.clip();
  ctx.beginPath();
  ctx.strokeStyle = color(name);
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

/** Returns an axis for the time of day. */
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

/** Plots lines over the time of day, from 0 up. `xRange` returns the shown range; without it, the data determines it. */
function lines(into, series, axis, xRange) {
  return plot(
    into,
    220,
    {
      padding: [4, RIGHT_OF_DAY, 0, 0],
      scales: {
        x: { time: true, ...(xRange ? { range: xRange } : {}) },
        y: { range: (u, least, most) => [0, Math.max(1, most ?? 1) * 1.1] },
      },
      axes: [axis, yAxis()],
      series: [
        {},
        ...series.map(({ isDashed, hue }) => ({
          stroke: () => color(`hue-${hue}`),
          width: 2,
          dash: isDashed ? [5, 4] : undefined,
          points: { show: false },
        })),
      ],
    },
    [[], ...series.map(() => [])],
  );
}

/** Plots the live rates: a line per policy and outcome. The axis covers the last `seconds`, also before there is data. */
export const live = (into, series, seconds) =>
  lines(
    into,
    series.map(({ outcome, hue }) => ({ isDashed: outcome === "denied", hue })),
    dayAxis(),
    () => [Date.now() / 1000 - seconds, Date.now() / 1000],
  );

/** Plots the counts of a backtest over time: requests, and denials by policy. */
export function overTime(into, { over_time: { points }, policies }) {
  const series = [
    { isDashed: false, hue: 0 },
    ...policies.map((_, index) => ({ isDashed: true, hue: (index + 1) % 6 })),
  ];
  const plot = lines(into, series, dayAxis());
  plot.setData([
    points.map(({ time }) => Date.parse(time) / 1000),
    points.map(({ requests }) => requests),
    ...policies.map((_, index) => points.map(({ denied }) => denied[index])),
  ]);
  return plot;
}
