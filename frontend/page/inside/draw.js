// What the pictures and tables of this view are made of: numbers as people read them, SVG, canvases, tables that keep
// their rows.

import { el } from "../dom.js";

const SVG = "http://www.w3.org/2000/svg";

/** An SVG element with attributes and children. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const whole = new Intl.NumberFormat("en");

/** 1,234; 0.5; 12.3: three digits or so. */
export function number(value) {
  if (!Number.isFinite(value)) return "–";
  return Math.abs(value) >= 100 || Number.isInteger(value) ? whole.format(Math.round(value)) : String(+value.toPrecision(2));
}

export const percent = (part, of) => (of ? `${(100 * part / of).toFixed(part && part < of ? 1 : 0)}%` : "–");

/** 0.4 ms, 12 ms, 1.2 s, 3 min. */
export function time(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 0.0095) return `${(1000 * seconds).toFixed(1)} ms`;
  if (seconds < 0.9995) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 99.5) return `${seconds.toFixed(1)} s`;
  return `${Math.round(seconds / 60)} min`;
}

/** 1.5 GiB. */
export function bytes(count) {
  let unit = 0;
  for (; count >= 1024 && unit < 4; unit++) count /= 1024;
  return `${count >= 100 || unit === 0 ? Math.round(count) : count.toFixed(1)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

/** The end of a request's id, in which those of one process differ. */
export const short = row => row.uid.slice(8) + (row.index ? `.${row.index}` : "");

/** "1 block", "2 blocks". */
export const many = (count, what) => `${number(count)} ${what}${count === 1 ? "" : "s"}`;

/** Bytes of base64. */
export const unpack = text => Uint8Array.from(atob(text), each => each.charCodeAt(0));

/** Colours by name, as the theme has them now: `colours().used` is `--c-used`. A canvas knows no variables. */
export function colours(node) {
  const style = getComputedStyle(node);
  const probe = name => style.getPropertyValue("--" + name).trim();
  return new Proxy({}, { get: (cache, name) => (cache[name] ??= probe(name)) });
}

/** A canvas as wide as its box and `height` CSS pixels high, cleared, scaled to the screen's pixels. */
export function clear(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = height + "px";
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** A section with a heading. */
export function panel(id, title, ...children) {
  return el("section", { class: "panel", "aria-labelledby": id }, el("h2", { id }, title), ...children);
}

/** A table in a box that scrolls sideways. `update(items, keyOf, cellsOf)` keeps the rows of items that stay, so that
 * focus and selection stay with them. A cell is text or a node; a node is made by the first call for its row alone. */
export function table(label, columns, empty) {
  const body = el("tbody");
  const none = el("p", { class: "muted none" }, empty);
  const head = columns.map(([name, kind]) => el("th", { scope: "col", class: kind }, name));
  const box = el("div", { class: "wide", role: "region", "aria-label": label, tabindex: "0" },
    el("table", {}, el("thead", {}, el("tr", {}, ...head)), body));
  const rows = new Map();
  function update(items, keyOf, cellsOf) {
    const there = new Set(items.map(keyOf));
    for (const [key, row] of rows) if (!there.has(key)) (row.remove(), rows.delete(key));
    items.forEach((item, place) => {
      const key = keyOf(item);
      let row = rows.get(key);
      if (!row) {
        row = el("tr", {}, ...columns.map(([, kind]) => el("td", { class: kind })));
        rows.set(key, row);
      }
      if (body.children[place] !== row) body.insertBefore(row, body.children[place] || null);
      cellsOf(item, row).forEach((cell, at) => {
        const node = row.children[at];
        if (cell instanceof Node) {
          if (!node.firstChild) node.append(cell);
        } else if (node.textContent !== String(cell)) node.textContent = cell;
      });
    });
    none.hidden = items.length > 0;
    box.hidden = !items.length;
  }
  update([], () => "", () => []);
  return { node: el("div", {}, box, none), update };
}
