// Playback: plays and pauses virtual time, and steps from decision to decision.

import { make, setText } from "./dom.js";
import { after } from "./lanes.js";
import { clock } from "./units.js";

const SPEEDS = [0.25, 0.5, 1, 2, 5, 10, 50];

/** Fills an element with the controls. Calls `moved` with the shown time in microseconds. */
export function playback(into, moved) {
  let durationUs = 1;
  let instants = [];
  let at = Infinity;
  let isPlaying = false;
  let lastFrame = 0;

  const play = make(
    "button",
    { type: "button", class: "primary play", onclick: () => (isPlaying ? pause() : start()) },
    "Play",
  );
  const back = make(
    "button",
    {
      type: "button",
      "aria-label": "Previous decision",
      title: "Previous decision",
      onclick: () => step(-1),
    },
    "‹",
  );
  const forth = make(
    "button",
    { type: "button", "aria-label": "Next decision", title: "Next decision", onclick: () => step(1) },
    "›",
  );
  const speed = make(
    "select",
    { name: "speed", "aria-label": "Speed", title: "Speed" },
    SPEEDS.map((times) => make("option", { value: times, selected: times === 1 }, `${times}×`)),
  );
  const time = make("input", {
    type: "range",
    name: "time",
    min: 0,
    max: 1000,
    step: 1,
    value: 1000,
    "aria-label": "Time",
    oninput: () => {
      pause();
      put((Number(time.value) / 1000) * durationUs);
    },
  });
  const shown = make("output", { class: "time" });
  into.replaceChildren(play, make("span", { class: "steps" }, back, forth), speed, time, shown);

  function put(us) {
    at = us;
    const now = Math.min(us, durationUs);
    time.value = Math.round((1000 * now) / durationUs);
    time.setAttribute("aria-valuetext", clock(now));
    setText(shown, clock(now));
    moved(us >= durationUs ? Infinity : us, now / durationUs);
  }
  function frame(now) {
    if (!isPlaying) return;
    put(at + (now - lastFrame) * 1000 * Number(speed.value));
    lastFrame = now;
    if (at >= durationUs) pause();
    else requestAnimationFrame(frame);
  }
  function start() {
    if (at >= durationUs) put(0);
    isPlaying = true;
    setText(play, "Pause");
    lastFrame = performance.now();
    requestAnimationFrame(frame);
  }
  function pause() {
    isPlaying = false;
    setText(play, "Play");
  }
  function step(direction) {
    pause();
    const now = Math.min(at, durationUs);
    const next = direction > 0 ? instants[after(instants, now)] : instants[after(instants, now - 1) - 1];
    put(next ?? (direction > 0 ? durationUs : 0));
  }

  return {
    /** Sets the duration and the decisions, and keeps the current time. */
    set(duration, decisions) {
      durationUs = duration;
      instants = decisions;
      put(at);
    },
    pause,
  };
}
