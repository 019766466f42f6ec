// Markdown to nodes. What a model writes is text: it becomes elements of a fixed few kinds, and never HTML.

import { el } from "../dom.js";

const FENCE = /^ *(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/; // within the items of lists it is indented
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const HEADING = /^(#{1,6}) +(.*)$/;
const CLOSING = /(?<! ) +#+ *$/; // of a heading
const ROW = /^ *\|.*\| *$/;
const MOST_DEPTH = 8;

/** Nodes for a text. */
export function markdown(text) {
  return blocks(text.split("\n"), 0);
}

function blocks(lines, depth) {
  const nodes = [];
  let at = 0;
  const takeWhile = test => {
    const from = at;
    while (at < lines.length && test(lines[at])) at++;
    return lines.slice(from, at);
  };
  while (at < lines.length) {
    const line = lines[at];
    let found;
    if (!line.trim()) at++;
    else if ((found = FENCE.exec(line))) {
      at++;
      const column = line.search(/\S/);
      const close = closing(found[1], column);
      const code = takeWhile(each => !close.test(each));
      at++;
      const margin = new RegExp(`^ {0,${column}}`); // the list's, and none of the code's own: it will be copied
      nodes.push(codeBlock(code.map(each => each.replace(margin, "")).join("\n"), found[2]));
    } else if ((found = HEADING.exec(line))) {
      at++;
      nodes.push(el("p", { class: "heading h" + found[1].length }, inline(found[2].trimEnd().replace(CLOSING, ""))));
    } else if (RULE.test(line)) {
      at++;
      nodes.push(el("hr"));
    } else if (line.startsWith(">") && depth < MOST_DEPTH) {
      const quoted = takeWhile(each => each.startsWith(">")).map(each => each.replace(/^> ?/, ""));
      nodes.push(el("blockquote", {}, blocks(quoted, depth + 1)));
    } else if (ITEM.test(line) && depth < MOST_DEPTH) {
      const isCode = codeOfList();
      nodes.push(list(takeWhile(each => isCode(each) || ITEM.test(each) || /^ +\S/.test(each)), depth));
    } else if (ROW.test(line) && /^ *\|[ :|-]+\| *$/.test(lines[at + 1] || "")) {
      nodes.push(table(takeWhile(each => ROW.test(each))));
    } else {
      at++; // whatever it begins with
      const rest = takeWhile(each => each.trim() && !FENCE.test(each) && !HEADING.test(each) && !ITEM.test(each));
      nodes.push(el("p", {}, inline([line, ...rest].join("\n"))));
    }
  }
  return nodes;
}

/** What ends the code that these ticks have opened in this column. */
const closing = (ticks, column) => new RegExp(`^ {0,${column + 3}}${ticks[0]}{${ticks.length},} *$`);

/** A test of the lines of a list, one after the other: is it code that one before it has opened? Code has empty lines, and
 * lines that begin as items do. */
function codeOfList() {
  let close = null;
  return line => {
    if (close) {
      if (close.test(line)) close = null;
      return true;
    }
    const found = FENCE.exec(ITEM.exec(line)?.[3] ?? line);
    if (found) close = closing(found[1], line.indexOf(found[1]));
    return false;
  };
}

function list(lines, depth) {
  const indent = ITEM.exec(lines[0])[1].length;
  const isOrdered = /\d/.test(ITEM.exec(lines[0])[2]);
  const items = [];
  const isCode = codeOfList();
  for (const line of lines) {
    const found = isCode(line) ? null : ITEM.exec(line);
    if (found && found[1].length <= indent + 1) items.push([found[3]]);
    else items.at(-1).push(line.slice(Math.max(0, Math.min(indent + 2, line.search(/\S/)))));
  }
  const start = isOrdered ? parseInt(ITEM.exec(lines[0])[2], 10) : undefined;
  const made = items.map(([first, ...rest]) =>
    el("li", {}, FENCE.test(first) ? blocks([first, ...rest], depth + 1) : [...inline(first), ...blocks(rest, depth + 1)]));
  return el(isOrdered ? "ol" : "ul", { start: start === 1 ? undefined : start }, made);
}

function table(rows) {
  const cells = rows.map(row => row.trim().slice(1, -1).split("|").map(cell => cell.trim()));
  const line = (tag, row) => el("tr", {}, row.map(cell => el(tag, {}, inline(cell))));
  const body = el("tbody", {}, cells.slice(2).map(row => line("td", row)));
  const made = el("table", {}, el("thead", {}, line("th", cells[0])), body);
  return el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" }, made);
}

function codeBlock(code, language) {
  const copy = el("button", { type: "button", class: "quiet", "aria-label": "Copy the code" }, "Copy");
  copy.addEventListener("click", () => copied(copy, code));
  const head = el("div", { class: "code-head" }, el("span", {}, language || "text"), copy);
  const pre = el("pre", { tabindex: 0, role: "group", "aria-label": "Code" }, el("code", {}, code));
  return el("div", { class: "code" }, head, pre);
}

/** Copy a text, and say on the button whether that went well. */
export async function copied(button, text) {
  const usual = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed"; // over plain HTTP to another machine, a browser gives no clipboard
  }
  setTimeout(() => (button.textContent = usual), 1500);
}

// What is tried at each place must be short, or have few places: an answer is drawn anew with each of its tokens.
const SPAN = new RegExp([
  /(?<!`)(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)/, // code
  /\*\*(\*[^*\n]+\*|(?=\S)(?:[^*\n]|(?<!\*)\*[^*\n]+\*(?!\*(?!\*)))+?(?<=\S))\*\*/, // bold, with italic in it
  /(?<!\w)__((?=\S)(?:[^_\n]|_(?!_))+?(?<=\S))__(?!\w)/,
  /\*(\S(?:[^*\n]*\S)?)\*/, // italic
  /(?<!\w)_(?=[^\s_])([^_\n]+?(?<=\S))_(?!\w)/,
  /~~([^~\n]+)~~/,
  /!?\[([^\]\n]*)\]\((\S{1,2000}?)\)/, // a link
  /(?<![\w\/])(https?:\/\/[^\s<>()"*`]{0,2000}[^\s<>()"*`.,:;!?'])/,
].map(each => each.source).join("|"));

/** Nodes for a line: code, bold, italic, struck out, and links to the web. */
function inline(text) {
  const nodes = [];
  let rest = text;
  let found;
  while ((found = SPAN.exec(rest))) {
    const [whole, ticks, code, bold, under, italic, slanted, struck, label, target, address] = found;
    nodes.push(rest.slice(0, found.index));
    if (ticks) nodes.push(el("code", {}, code));
    else if (bold || under) nodes.push(el("strong", {}, inline(bold || under)));
    else if (italic || slanted) nodes.push(el("em", {}, inline(italic || slanted)));
    else if (struck) nodes.push(el("s", {}, struck));
    else nodes.push(link(label, target || address, whole));
    rest = rest.slice(found.index + whole.length);
  }
  nodes.push(rest);
  return nodes.filter(node => node !== "");
}

function link(label, target, whole) {
  if (!/^(https?|mailto):/i.test(target)) return whole; // no script, and no path of this server
  return el("a", { href: target, target: "_blank", rel: "noopener noreferrer" }, label || target);
}
