// The timeline of steps: above, how long each took; below, what it computed. It can be stopped, and scrolled while it
// stands.

import { el } from "../dom.js";
import { clear, colours, many, number, panel, table, time } from "./draw.js";

const KEPT = 4000; // entries: older ones are forgotten
const PITCH = 6; // CSS pixels of one entry
const [MARKS, ABOVE, BELOW] = [28, 56, 68]; // CSS pixels: marks of events in two lines, durations, tokens

/** One entry in words. */
function words(entry) {
  const where = `replica ${entry.replica}`;
  if (entry.kind === "join") return `${where} joined`;
  if (entry.kind === "leave") return `${where} left as it was asked to`;
  if (entry.kind === "loss") return `${where} was lost; ${many(entry.requeued, "sequence")} went back in line`;
  const parts = [];
  if (entry.prefill) parts.push(many(entry.prefill, "prompt token"));
  if (entry.decodes) parts.push(many(entry.decodes, "decode"));
  if (entry.preempted) parts.push(many(entry.preempted, "preemption"));
  if (entry.recomputed) parts.push(`${many(entry.recomputed, "token")} computed again`);
  return `step of ${where}, ${time(entry.seconds)}: ${parts.join(", ") || "nothing"}`;
}

const clock = entry => new Date(1000 * entry.ended).toLocaleTimeString("en-GB") + "." + String(Math.floor(1000 * (entry.ended % 1))).padStart(3, "0");
const mark = entry =>
  entry.kind === "loss" ? "✕" : entry.kind === "join" ? "+" : entry.kind === "leave" ? "–" : entry.preempted ? "▲" : entry.recomputed ? "↻" : "";

/** The panel. */
export function timeline() {
  let entries = [];
  let stopped = false;
  let end = 0; // entries up to which is shown, while it stands
  let at = -1; // the entry that is pointed at, by its number

  const canvas = el("canvas", {
    class: "steps", role: "slider", tabindex: "0", "aria-label": "Steps", "aria-valuemin": "0", "aria-valuemax": "0",
    "aria-valuenow": "0", "aria-valuetext": "no step", onkeydown: key, onpointermove: point,
    onpointerleave: () => document.activeElement !== canvas && go(-1), onblur: () => go(-1),
  });
  const told = el("p", { class: "words" });
  const button = el("button", { type: "button", "aria-pressed": "false", onclick: () => stop(!stopped) }, "Stop");
  const scroll = el("input", { type: "range", min: "0", max: "0", step: "1", "aria-label": "Scroll through the steps", oninput: () => {
    end = Number(scroll.value); // drawing sets the slider to `end`
    stop(true);
  } });
  const listed = table("The steps that are shown, the newest first",
    [["Ended", "mono"], ["Replica", "count"], ["Took", "count"], ["Prompt tokens", "count"], ["Decodes", "count"], ["What else", ""]], "No step yet.");
  const details = el("details", { ontoggle: () => list() }, el("summary", {}, "As a table"), listed.node);
  const legend = [["decode", "decodes"], ["prefill", "prompt tokens"], ["took", "time taken"]].map(([name, what]) =>
    el("li", {}, el("i", { class: "swatch " + name, "aria-hidden": "true" }), what));
  const marks = el("li", {}, "▲ preemption, ↻ computed again, ✕ worker lost, + worker joined");
  const node = panel("in-steps", "Steps", el("div", { class: "bar" }, button, scroll), canvas,
    el("ul", { class: "legend" }, ...legend, marks), told, details);
  new ResizeObserver(draw).observe(node);

  const room = () => Math.max(1, Math.floor(canvas.clientWidth / PITCH));
  const shown = () => entries.slice(Math.max(0, end - room()), end);

  function stop(on) {
    stopped = on;
    button.textContent = on ? "Go on" : "Stop";
    button.setAttribute("aria-pressed", String(on));
    if (!on) end = entries.length;
    draw();
  }

  function update(event) {
    const last = entries.length ? entries[entries.length - 1].number : -1;
    const fresh = event.steps;
    if (fresh.length && fresh[0].number <= last) entries = []; // another scheduler counts anew
    const before = entries.length;
    entries = [...entries, ...fresh];
    const gone = Math.max(0, entries.length - KEPT);
    entries = entries.slice(gone);
    end = stopped && before ? Math.max(Math.min(room(), entries.length), end - gone) : entries.length;
    if (fresh.length || !before) draw();
  }

  function draw() {
    const width = canvas.clientWidth;
    if (!width) return;
    scroll.min = Math.min(room(), entries.length);
    scroll.max = entries.length;
    scroll.value = end;
    scroll.disabled = entries.length <= room();
    const context = clear(canvas, width, MARKS + ABOVE + BELOW + 2);
    const paint = colours(canvas);
    const seen = shown();
    const slowest = Math.max(...seen.map(each => each.seconds), 1e-4);
    const most = Math.log2(1 + Math.max(...seen.map(each => each.prefill + each.decodes), 1));
    const floor = MARKS + ABOVE + BELOW;
    const rect = (colour, x, y, height, wide = PITCH - 1.5) => {
      context.fillStyle = paint[colour];
      context.fillRect(x, y, wide, height);
    };
    const free = [-Infinity, -Infinity]; // from where on each of the two lines of marks is
    context.font = "bold 12px sans-serif";
    context.textAlign = "center";
    seen.forEach((each, place) => {
      const x = width - (seen.length - place) * PITCH;
      if (each.number === at) rect("accent-soft", x - 0.75, 0, floor);
      const took = (ABOVE - 6) * (each.seconds / slowest);
      rect("c-took", x, MARKS + ABOVE - 4 - took, took);
      const tokens = each.prefill + each.decodes;
      const height = ((BELOW - 2) * Math.log2(1 + tokens)) / most;
      const prefill = tokens ? (height * each.prefill) / tokens : 0;
      rect("c-prefill", x, floor - height, prefill);
      rect("c-decode", x, floor - height + prefill, height - prefill);
      const sign = mark(each);
      if (!sign) return;
      const colour = { "✕": "bad", "▲": "warn", "+": "good" }[sign] || "ink";
      if (each.kind !== "step") rect(colour, x + 1, MARKS, floor - MARKS, PITCH - 4);
      const line = free.findIndex(from => x >= from);
      if (line < 0) return; // two are there already
      free[line] = x + 12;
      context.fillStyle = paint[colour];
      context.fillText(sign, x + PITCH / 2, 12 + 13 * line);
    });
    context.fillStyle = paint.line;
    context.fillRect(0, MARKS + ABOVE - 3, width, 1);
    context.fillRect(0, floor, width, 1);
    canvas.setAttribute("aria-valuemax", Math.max(0, seen.length - 1));
    tell(seen.findIndex(each => each.number === at), seen, slowest);
    list();
  }

  function tell(place, seen, slowest) {
    const entry = seen[place];
    const missing = seen.length ? seen.at(-1).number - seen[0].number + 1 - seen.length : 0; // the feed tells 256 at a time
    const fast = missing ? `, and ${many(missing, "step")} between them went by too fast to be told` : "";
    const all = `${many(seen.length, "entry").replace("entrys", "entries")} shown${fast}; the slowest took ${time(slowest)}; heights of tokens are logarithmic.`;
    told.textContent = entry ? `${clock(entry)}: ${words(entry)}.` : seen.length ? all : "No step has run since this view was opened.";
    canvas.setAttribute("aria-valuenow", Math.max(0, place));
    canvas.setAttribute("aria-valuetext", told.textContent);
  }

  function list() {
    if (!details.open) return;
    const newest = shown().slice(-50).reverse();
    listed.update(newest, each => each.number, each => [
      clock(each), each.replica, each.kind === "step" ? time(each.seconds) : "", each.prefill ? number(each.prefill) : "",
      each.decodes ? number(each.decodes) : "", each.kind !== "step" || mark(each) ? words(each).replace(/^step.*?: /, "") : "",
    ]);
  }

  function go(number) {
    at = number;
    draw();
  }

  function point(event) {
    const seen = shown();
    const place = seen.length - Math.ceil((canvas.getBoundingClientRect().right - event.clientX) / PITCH);
    go(seen[place]?.number ?? -1);
  }

  function key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -room(), PageDown: room(), Home: -KEPT, End: KEPT }[event.key];
    if (!step || !entries.length) return;
    event.preventDefault();
    stop(true);
    const from = entries.findIndex(each => each.number === at);
    const to = Math.max(0, Math.min(entries.length - 1, (from < 0 ? end : from) + step));
    end = Math.min(entries.length, Math.max(to + 1, Math.min(end, to + room())));
    go(entries[to].number);
  }

  return { node, update, draw };
}
