// The map of the KV blocks: one square a block (or several neighbours of a large pool), by state. Pointing at one, or
// going there with the arrow keys, says who holds it and shows all that they hold.

import { el } from "../dom.js";
import { clear, colours, many, number, panel, percent, short, unpack } from "./draw.js";

const STATES = ["free", "cached", "used", "shared"];
const NAMES = ["free", "cached", "in use", "shared"];
const HIGHEST = 216; // CSS pixels

class Map_ {
  constructor(replica, pick) {
    this.replica = replica;
    this.pick = pick;
    this.at = -1; // the cell that is pointed at
    this.canvas = el("canvas", {
      class: "cells", role: "slider", tabindex: "0", "aria-label": `KV blocks of replica ${replica}`,
      "aria-valuemin": "0", "aria-valuenow": "0", "aria-valuemax": "0", "aria-valuetext": "no block",
      onkeydown: event => this.key(event),
      onpointermove: event => this.point(event),
      onpointerleave: () => document.activeElement !== this.canvas && this.go(-1),
      onblur: () => this.go(-1),
      onfocus: () => this.at < 0 && this.go(0),
    });
    this.counts = STATES.map(() => el("b", {}, "0"));
    const legend = STATES.map((state, at) =>
      el("li", {}, el("i", { class: "swatch " + state, "aria-hidden": "true" }), NAMES[at] + " ", this.counts[at]));
    this.title = el("h3");
    this.words = el("p", { class: "words" });
    this.node = el("div", { class: "map" }, this.title, this.canvas, el("ul", { class: "legend" }, ...legend), this.words);
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentNode);
  }

  /** A map of the feed, and the rows of this replica. */
  update(map, rows, blockSize) {
    this.map = map;
    this.cells = unpack(map.cells);
    this.rows = rows.map(row => ({ ...row, held: new Int32Array(unpack(row.cells).buffer) }));
    const counts = [map.blocks - map.used - map.cached, map.cached, map.used - map.shared, map.shared];
    counts.forEach((count, at) => (this.counts[at].textContent = number(count)));
    const fold = map.fold > 1 ? `, ${map.fold} in a square` : "";
    this.title.textContent = `Replica ${this.replica}: ${many(map.blocks, "block")} of ${blockSize} tokens${fold}, ${percent(map.used, map.blocks)} in use`;
    this.canvas.setAttribute("aria-valuemax", this.cells.length - 1);
    this.go(Math.min(this.at, this.cells.length - 1), this.at >= 0); // others may hold that block by now
  }

  holders(cell) {
    return this.rows.filter(({ held }) => {
      for (let at = 0; at < held.length; at += 2) if (cell >= held[at] && cell < held[at] + held[at + 1]) return true;
      return false;
    });
  }

  /** Point at a cell, -1 for none. */
  go(cell, told = true) {
    this.at = cell;
    const holders = cell < 0 ? [] : this.holders(cell);
    this.words.textContent = this.say(cell, holders);
    if (cell >= 0) {
      this.canvas.setAttribute("aria-valuenow", cell);
      this.canvas.setAttribute("aria-valuetext", this.words.textContent);
    }
    this.lit = holders;
    if (told) this.pick(holders);
    this.draw();
  }

  say(cell, holders) {
    if (cell < 0) return "Point at a square, or go there with the arrow keys, to see which requests hold it.";
    const { fold, blocks } = this.map;
    const last = Math.min((cell + 1) * fold, blocks) - 1;
    const what = fold > 1 ? `Blocks ${cell * fold} to ${last}` : `Block ${cell}`;
    const state = this.cells[cell];
    if (state < 2) return `${what}: ${state ? "cached, held by nobody" : "free"}.`;
    if (!holders.length) return `${what}: ${NAMES[state]}, by a request that is not listed here.`;
    const names = holders.slice(0, 8).map(row => `${short(row)} (${row.phase})`).join(", ");
    return `${what}: ${NAMES[state]}, held by ${names}${holders.length > 8 ? ` and ${holders.length - 8} more` : ""}.`;
  }

  /** Show what this row holds. */
  light(row) {
    this.lit = row ? this.rows.filter(each => each.uid === row.uid && each.index === row.index) : [];
    this.draw();
  }

  key(event) {
    const wide = this.columns || 1;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: wide, ArrowUp: -wide, PageDown: 8 * wide, PageUp: -8 * wide }[event.key];
    const to = event.key === "Home" ? 0 : event.key === "End" ? this.cells.length - 1 : step && this.at + step;
    if (to === undefined) return;
    event.preventDefault();
    if (to >= 0 && to < this.cells.length) this.go(to);
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.pitch);
    const cell = Math.floor((event.clientY - box.top) / this.pitch) * this.columns + column;
    this.go(column < this.columns && cell < this.cells.length ? cell : -1);
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (!this.map || !width) return;
    const count = this.cells.length;
    let size = 15;
    do {
      size--;
      this.pitch = size + (size > 5 ? 2 : 1);
      this.columns = Math.max(1, Math.floor(width / this.pitch));
    } while (size > 3 && Math.ceil(count / this.columns) * this.pitch > HIGHEST);
    const lines = Math.ceil(count / this.columns);
    const context = clear(this.canvas, width, lines * this.pitch + 2);
    const paint = colours(this.canvas);
    const square = (cell, grow) => {
      const x = (cell % this.columns) * this.pitch + 1 - grow;
      const y = Math.floor(cell / this.columns) * this.pitch + 1 - grow;
      return [x, y, size + 2 * grow, size + 2 * grow, size > 5 ? 2 : 0];
    };
    STATES.forEach((state, number) => {
      context.fillStyle = paint["c-" + state];
      context.beginPath();
      for (let cell = 0; cell < count; cell++) if (this.cells[cell] === number) context.roundRect(...square(cell, 0));
      context.fill();
    });
    context.strokeStyle = paint.ink;
    context.lineWidth = 1.5;
    for (const { held } of this.lit || []) {
      context.beginPath();
      for (let at = 0; at < held.length; at += 2)
        for (let cell = held[at]; cell < held[at] + held[at + 1]; cell++) context.roundRect(...square(cell, 0));
      context.stroke();
    }
    if (this.at >= 0) {
      context.lineWidth = 2.5;
      context.beginPath();
      context.roundRect(...square(this.at, 0.5));
      context.stroke();
    }
  }
}

/** The maps of all replicas. `pick(rows)` is told who holds what is pointed at. */
export function blockMaps(pick) {
  const maps = new Map();
  const none = el("p", { class: "muted none" }, "No worker is ready, so there are no blocks.");
  const box = panel("in-blocks", "KV blocks", none);
  return {
    node: box,
    update(event) {
      const there = new Set(event.maps.map(each => each.replica));
      for (const [replica, map] of maps) if (!there.has(replica)) (map.node.remove(), maps.delete(replica));
      for (const each of event.maps) {
        let map = maps.get(each.replica);
        if (!map) {
          map = new Map_(each.replica, pick);
          maps.set(each.replica, map);
          box.append(map.node);
        }
        map.update(each, event.rows.filter(row => row.replica === each.replica), event.block_size);
      }
      none.hidden = maps.size > 0;
    },
    light: row => maps.forEach(map => map.light(row)),
    draw: () => maps.forEach(map => map.draw()),
  };
}
