// Look inside: what the server is doing, live. Each panel follows the same feed.

import { el } from "../dom.js";
import { blockMaps } from "./blocks.js";
import { bytes, number, panel, percent, short, table, time } from "./draw.js";
import { followVisibly } from "./feed.js";
import { histograms, tiles } from "./figures.js";
import { timeline } from "./steps.js";

const FEW = 64; // rows of a table

let leave = null;

function requests(maps) {
  let pinned = null; // the row whose blocks stay lit
  let held = new Set(); // rows that hold the block that is pointed at
  const running = table("Sequences that run", [
    ["Request", "mono"], ["Phase", ""], ["Replica", "count"], ["Prompt", "count"], ["Computed", "count"], ["Tokens", "count"], ["Age", "count"],
  ], "Nothing runs.");
  const waiting = table("Sequences in line", [["Request", "mono"], ["Prompt", "count"], ["Had", "count"], ["Waits", "count"]], "Nobody waits.");
  const more = el("p", { class: "muted" });
  const key = row => `${row.uid}.${row.index}`;
  const nodes = new Map();

  function name(row) {
    const button = el("button", {
      type: "button", class: "quiet mono", title: row.uid, "aria-pressed": "false", "aria-label": `Show the blocks of ${short(row)}`,
      onclick: () => pin(pinned && key(pinned) === key(row) ? null : row),
      onpointerenter: () => pinned || maps.light(row), onpointerleave: () => pinned || maps.light(null),
    }, short(row));
    nodes.set(key(row), button);
    return button;
  }

  function shade() {
    nodes.forEach((button, each) => button.closest("tr").classList.toggle("lit", held.has(each)));
  }

  function pin(row) {
    pinned = row;
    nodes.forEach((button, each) => button.setAttribute("aria-pressed", String(Boolean(row) && each === key(row))));
    maps.light(row);
  }

  return {
    node: el("div", { class: "pair uneven" }, panel("in-rows", "Running", running.node, more), panel("in-queue", "Queue", waiting.node)),
    update(event) {
      const rows = event.rows.slice(0, FEW);
      running.update(rows, key, (row, line) => [
        line.children[0].firstChild || name(row), row.phase, row.replica, number(row.prompt), number(row.computed),
        `${number(row.total)} of ${number(row.limit)}`, time(row.age),
      ]);
      waiting.update(event.queue, key, row => [short(row), number(row.prompt), number(row.outputs), time(row.age)]);
      const left = event.counters.running - rows.length;
      more.textContent = left > 0 ? `and ${number(left)} more` : "";
      const there = new Set(rows.map(key));
      for (const each of nodes.keys()) if (!there.has(each)) nodes.delete(each);
      if (pinned && !there.has(key(pinned))) pin(null);
      else if (pinned) maps.light(pinned);
      shade();
    },
    /** Mark the rows that hold what is pointed at in a map. */
    mark(rows) {
      held = new Set(rows.map(key));
      shade();
    },
  };
}

function workers() {
  const listed = table("All workers", [
    ["Replica", ""], ["Phase", ""], ["Device", ""], ["Running", "count"], ["KV blocks", "count"], ["KV memory", "count"],
    ["Process memory", "count"], ["Steps", "count"], ["Process", "count"],
  ], "No worker is here.");
  return {
    node: panel("in-workers", "Workers", listed.node),
    update: event =>
      listed.update(event.workers, each => each.worker, each => [
        each.replica, each.phase, each.device, number(each.running),
        `${number(each.blocks_used)} of ${number(each.blocks)} (${percent(each.blocks_used, each.blocks)})`,
        each.block_bytes ? `${bytes(each.blocks_used * each.block_bytes)} of ${bytes(each.blocks * each.block_bytes)}` : "–",
        each.resident ? bytes(each.resident) : "–", number(each.last_step), each.pid,
      ]),
  };
}

/** Fill `element` and follow the feed until `unmount`. */
export function mount(element) {
  const dot = el("i", { class: "dot", "aria-hidden": "true" });
  const state = el("span", { role: "status" }, "Connecting");
  const about = el("span", { class: "muted" });
  const figures = tiles();
  let lists = null;
  const maps = blockMaps(rows => lists.mark(rows));
  lists = requests(maps);
  const parts = [figures, maps, timeline(), lists, workers(), histograms()];
  const view = el("div", { class: "inside" }, el("p", { class: "state" }, dot, state, about), ...parts.map(part => part.node));
  element.replaceChildren(view);

  function say(kind, text) {
    view.dataset.state = kind;
    if (state.textContent !== text) state.textContent = text;
  }

  const end = followVisibly(event => {
    about.textContent = `${event.model}, quire ${event.version}`;
    if (!event.scheduler) return say("lost", "No scheduler answers; it is being started again");
    say("live", "Live");
    for (const part of parts) part.update(event);
  }, say);
  const redraw = () => parts.forEach(part => part.draw?.());
  const dark = matchMedia("(prefers-color-scheme: dark)");
  document.addEventListener("quire:theme", redraw);
  dark.addEventListener("change", redraw);
  leave = () => {
    end();
    document.removeEventListener("quire:theme", redraw);
    dark.removeEventListener("change", redraw);
    element.replaceChildren();
  };
}

/** Leave the feed. */
export function unmount() {
  leave?.();
  leave = null;
}
