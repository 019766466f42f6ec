// Figures: tokens a second with their last minute, what is full, what is found, and the two histograms.

import { el } from "../dom.js";
import { many, number, panel, percent, svg, time } from "./draw.js";

const POINTS = 120; // of a line: a minute

class Tile {
  constructor(name) {
    this.value = el("strong", {}, "–");
    this.note = el("small", { class: "muted" });
    this.node = el("div", { class: "tile" }, el("h2", {}, name), this.value, this.note);
  }

  set(value, note) {
    this.value.textContent = value;
    this.note.textContent = note;
  }
}

class Meter extends Tile {
  constructor(name) {
    super(name);
    this.bar = svg("rect", { height: 4, width: 0, rx: 2, class: "fill" });
    this.node.append(svg("svg", { class: "meter", "aria-hidden": "true", preserveAspectRatio: "none", viewBox: "0 0 100 4" },
      svg("rect", { height: 4, width: 100, rx: 2, class: "rail" }), this.bar));
  }

  share(part, of) {
    this.bar.setAttribute("width", of ? (100 * part) / of : 0);
  }
}

class Line extends Tile {
  constructor(name) {
    super(name);
    this.points = [];
    this.path = svg("path", { class: "line" });
    this.area = svg("path", { class: "area" });
    this.node.classList.add("broad");
    this.node.append(svg("svg", { class: "spark", "aria-hidden": "true", preserveAspectRatio: "none", viewBox: "0 0 120 32" },
      this.area, this.path));
  }

  add(value) {
    this.points = [...this.points, value].slice(-POINTS);
    const most = Math.max(...this.points);
    const first = POINTS - this.points.length;
    const line = this.points.map((each, at) => `${first + at + 0.5},${(30.5 - (29 * each) / Math.max(most, 1)).toFixed(1)}`);
    this.path.setAttribute("d", "M" + line.join("L"));
    this.area.setAttribute("d", `M${first + 0.5},32L${line.join("L")}L${POINTS - 0.5},32Z`);
    return most;
  }
}

/** The tiles. `update(event)` follows the feed; rates are differences between two events. */
export function tiles() {
  const rate = new Line("Generated tokens / s");
  const prompts = new Line("Prompt tokens / s");
  const load = new Tile("Requests");
  const memory = new Meter("KV cache in use");
  const hits = new Meter("Prefix-cache hits");
  const kept = new Meter("Drafts accepted");
  let before = null;

  function update({ counters: now, time: at }) {
    if (before && before.at < at && before.generation_tokens <= now.generation_tokens) {
      const each = name => (now[name] - before[name]) / (at - before.at);
      const [generated, read] = [each("generation_tokens"), each("prompt_tokens")];
      rate.set(number(generated), `at most ${number(rate.add(generated))} in the last minute`);
      prompts.set(number(read), `at most ${number(prompts.add(read))} in the last minute`);
    }
    before = { ...now, at };
    load.set(`${number(now.running)} running`, `${number(now.waiting)} waiting, ${many(now.preemptions, "preemption")} so far`);
    memory.set(percent(now.blocks_used, now.blocks), `${number(now.blocks_used)} of ${many(now.blocks, "block")}`);
    memory.share(now.blocks_used, now.blocks);
    hits.set(percent(now.prefix_hits, now.prefix_queries), `${number(now.prefix_hits)} of ${many(now.prefix_queries, "prompt token")}`);
    hits.share(now.prefix_hits, now.prefix_queries);
    const accepted = now.accepted.reduce((sum, each) => sum + each, 0);
    // A position counts all drafts, so it falls from one to the next.
    const places = now.accepted.slice(0, 5).map(each => percent(each, now.drafts).replace(/\.\d/, "")).join(", ");
    const drafts = `${number(accepted)} of ${many(now.draft_tokens, "drafted token")}; by position ${places}`;
    kept.set(percent(accepted, now.draft_tokens), now.draft_tokens ? drafts : "nothing was drafted");
    kept.share(accepted, now.draft_tokens);
  }

  const all = [rate, prompts, load, memory, hits, kept];
  return { node: el("div", { class: "tiles" }, ...all.map(each => each.node)), update };
}

/** The upper bound of the bucket in which a share of all observations ends. */
function quantile(bins, share) {
  let left = share * bins.reduce((sum, [, count]) => sum + count, 0);
  for (const [bound, count] of bins) if ((left -= count) <= 0) return bound;
  return null;
}

function histogram(id, title, what) {
  const bars = svg("g");
  const labels = svg("g", { class: "labels" });
  const picture = svg("svg", { viewBox: "0 0 320 118", role: "img" }, bars, labels);
  const words = el("p", { class: "muted" }, "Nothing has been measured yet.");

  function update(all) {
    const first = all.findIndex(([, count]) => count);
    picture.toggleAttribute("hidden", first < 0);
    if (first < 0) return;
    const bins = all.slice(first);
    const total = bins.reduce((sum, [, count]) => sum + count, 0);
    const told = share => {
      const bound = quantile(bins, share);
      return bound === null ? "over the last bound" : `≤ ${time(bound)}`;
    };
    words.textContent = `${many(total, what)}: half ${told(0.5)}, 95% ${told(0.95)}, 99% ${told(0.99)}.`;
    picture.setAttribute("aria-label", `${title}. ${words.textContent}`);
    const most = Math.max(...bins.map(([, count]) => count));
    const step = 320 / bins.length;
    const every = Math.ceil(44 / step);
    bars.replaceChildren(...bins.map(([bound, count], at) => {
      const height = count ? Math.max(2, (92 * count) / most) : 0;
      const bar = svg("rect", { class: "fill", x: at * step + 1, y: 96 - height, width: Math.min(step - 2, 60), height, rx: 2 });
      bar.append(svg("title", {}, `${bound === null ? "over the last bound" : `≤ ${time(bound)}`}: ${number(count)}`));
      return bar;
    }));
    labels.replaceChildren(...bins.map(([bound], at) =>
      svg("text", { x: at * step + 1, y: 112 }, at % every ? "" : bound === null ? "more" : time(bound))));
  }

  return { node: panel(id, title, picture, words), update };
}

/** Time to first token, and between tokens, of the server's frontends since their start. */
export function histograms() {
  const first = histogram("in-ttft", "Time to first token", "request");
  const between = histogram("in-itl", "Time between tokens", "token");
  return {
    node: el("div", { class: "pair" }, first.node, between.node),
    update(event) {
      first.update(event.ttft);
      between.update(event.itl);
    },
  };
}
