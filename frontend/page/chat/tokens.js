// An answer token by token: coloured by probability, with what else might have stood there.

import { el } from "../dom.js";
import { textOf } from "./request.js";

const LEVELS = [0.1, 0.3, 0.6, 0.9]; // between the five shades

const percent = logprob => {
  const share = 100 * Math.exp(logprob);
  return share >= 99.95 ? "100%" : share < 0.1 ? "<0.1%" : share.toFixed(1) + "%";
};
const visible = text => (text || "∅").replaceAll("\n", "↵").replaceAll(" ", "␣").replaceAll("\t", "⇥");

/** Nodes for a message's tokens. `replace(index, alternative)` is called where the reader takes another token; null where
 * the answer cannot go on from one. */
export function tokenView(message, replace) {
  const panel = el("div", { class: "alternatives", hidden: true, role: "group" });
  const spans = message.tokens.map((token, index) => span(token, index));
  const text = el("div", { class: "tokens", role: "group", "aria-label": "Tokens; arrow keys move among them" }, spans);
  const whole = el("div", { class: "token-view" }, text, panel);
  if (spans.length) spans[0].tabIndex = 0;
  let shown = -1;
  // The token that ends a turn is no text to go on from.
  const last = ["stop", "tool_calls"].includes(message.finish) ? textOf(message.tokens.slice(-1)) : "";
  const end = last && !message.content.endsWith(last) ? last : null;

  function span(token, index) {
    const level = LEVELS.filter(each => Math.exp(token.logprob) >= each).length;
    const written = textOf([token]);
    return el("span", {
      class: "token", role: "button", tabindex: -1, dataset: { p: level, index },
      "aria-label": `${visible(written)}, ${percent(token.logprob)}`,
    }, written);
  }

  function show(index) {
    if (index === shown) return;
    shown = index;
    const { top, logprob } = message.tokens[index];
    const title = el("p", {}, el("code", {}, visible(textOf([message.tokens[index]]))), " ", percent(logprob));
    const rows = top.map(each => {
      const bar = el("span", { class: "bar" });
      bar.style.setProperty("--share", Math.exp(each.logprob).toFixed(4));
      const parts = [el("code", {}, visible(textOf([each]))), bar, el("span", { class: "share" }, percent(each.logprob))];
      if (!replace || textOf([each]) === end) return el("div", { class: "alternative" }, ...parts);
      const label = `Go on with ${visible(textOf([each]))}, ${percent(each.logprob)}`;
      return el("button", { type: "button", class: "alternative", "aria-label": label, onclick: () => replace(index, each) }, ...parts);
    });
    panel.replaceChildren(title, ...rows, replace ? el("p", { class: "hint" }, "Choose one to go on from here with it.") : "");
    panel.setAttribute("aria-label", "What might have stood here");
    panel.hidden = false;
    const box = spans[index].getClientRects()[0] || spans[index].getBoundingClientRect();
    const around = whole.getBoundingClientRect();
    const left = Math.max(0, Math.min(box.left - around.left, around.width - panel.offsetWidth));
    panel.style.left = left + "px";
    panel.style.top = box.bottom - around.top + 4 + "px";
  }

  function hide() {
    shown = -1;
    panel.hidden = true;
  }

  function focus(index) {
    for (const each of spans) each.tabIndex = -1;
    spans[index].tabIndex = 0;
    spans[index].focus();
  }

  text.addEventListener("pointerover", event => {
    if (event.target.dataset.index) show(Number(event.target.dataset.index));
  });
  text.addEventListener("focusin", event => {
    show(Number(event.target.dataset.index));
    panel.scrollIntoView({ block: "nearest" });
  });
  text.addEventListener("click", event => {
    if (event.target.dataset.index) focus(Number(event.target.dataset.index));
  });
  whole.addEventListener("pointerleave", () => whole.contains(document.activeElement) || hide());
  whole.addEventListener("focusout", event => whole.contains(event.relatedTarget) || hide());
  whole.addEventListener("keydown", event => {
    const now = Number(document.activeElement.dataset.index ?? -1);
    if (event.key === "Escape" && !panel.hidden) {
      event.stopPropagation();
      const back = shown;
      if (panel.contains(document.activeElement)) focus(back);
      hide();
    } else if (now < 0) {
      return;
    } else if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
      event.preventDefault();
      focus(Math.max(0, Math.min(spans.length - 1, now + (event.key === "ArrowRight" ? 1 : -1))));
    } else if (event.key === "Enter" || event.key === " " || event.key === "ArrowDown") {
      event.preventDefault();
      panel.querySelector("button")?.focus();
    }
  });
  return whole;
}
