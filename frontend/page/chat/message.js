// One message: what was said, thought and called, and what can be done with it.

import { el } from "../dom.js";
import { copied, markdown } from "./markdown.js";
import { textOf } from "./request.js";
import { tokenView } from "./tokens.js";

const NAMES = { user: "You", assistant: "Model", tool: "Tool", system: "System" };
const ENDS = { length: "cut off at max_tokens", stopped: "stopped", tool_calls: "calls a tool", content_filter: "filtered" };

/** An article that shows `message`. `act` has what its buttons do: edit, regenerate, replace, answer, choose; `running`
 * says whether an answer is being written, this one where `isLive`. */
export function messageView(message, act, { running, isLive, isLast, showTokens }) {
  const label = NAMES[message.role] + (message.label ? " " + message.label : "");
  const article = el("article", { class: "message " + message.role, "aria-label": label });
  if (message.variants) {
    const columns = message.variants.map((each, index) => {
      const shown = messageView({ ...each, label: "AB"[index] }, {}, { running: true, isLive, isLast, showTokens });
      const keep = el("button", { type: "button", disabled: running, onclick: () => act.choose(index) }, `Keep ${"AB"[index]}`);
      return el("div", { class: "variant" }, shown, keep);
    });
    article.append(el("div", { class: "variants" }, ...columns));
    return article;
  }
  article.append(el("h2", { class: "who" }, label), ...body(message, act, { isLive, running, showTokens }));
  if (message.calls?.length) article.append(...calls(message, act, isLast && !running));
  if (message.error) article.append(el("p", { class: "notice bad", role: "alert" }, message.error));
  if (!isLive) article.append(foot(message, act, running));
  return article;
}

function body(message, act, { isLive, running, showTokens }) {
  const nodes = [];
  if (message.reasoning) {
    const thinks = isLive && !message.content;
    const fold = el("details", { class: "fold" }, el("summary", {}, thinks ? "Thinking…" : "Thoughts"), el("div", { class: "prose" }, markdown(message.reasoning)));
    nodes.push(fold);
  }
  if (message.role === "user") nodes.push(el("div", { class: "said" }, message.content));
  else if (message.role === "tool") {
    nodes.push(el("details", { class: "fold" }, el("summary", {}, "Result"), el("pre", { tabindex: 0 }, message.content)));
  } else if (showTokens && message.tokens?.length && !isLive) {
    // The answer goes on from a token by its text, which must be all of it. A thought that the prompt has opened is not.
    const text = textOf(message.tokens).trimStart();
    const isWhole = message.reasoning ? !text.startsWith(message.reasoning.slice(0, 8)) : message.calls || text.startsWith(message.content.trimStart());
    nodes.push(tokenView(message, isWhole && act.replace && !running ? act.replace : null));
  } else nodes.push(el("div", { class: "prose" }, markdown(message.content)));
  if (isLive && !message.content && !message.reasoning) nodes.push(el("p", { class: "waiting" }, "…"));
  return nodes;
}

function calls(message, act, isOpen) {
  const boxes = [];
  const nodes = message.calls.map(call => {
    let text = call.arguments;
    try {
      text = JSON.stringify(JSON.parse(text), null, 2);
    } catch {
      // It is still being written, or the model has written no JSON.
    }
    const summary = el("summary", {}, "Calls ", el("code", {}, call.name));
    const fold = el("details", { class: "fold call" }, summary, el("pre", { tabindex: 0 }, text));
    if (!isOpen || !act.answer) return fold;
    const box = el("textarea", { rows: 2, spellcheck: "false", placeholder: "What the tool returned" });
    boxes.push(box);
    return el("div", { class: "call-open" }, fold, el("label", {}, `Result of ${call.name}`, box));
  });
  if (boxes.length) {
    const send = () => act.answer(message.calls.map((call, index) => ({ role: "tool", call: call.id, content: boxes[index].value })));
    nodes.push(el("div", { class: "row" }, el("button", { type: "button", class: "primary", onclick: send }, "Send results")));
  }
  return nodes;
}

function foot(message, act, running) {
  const button = (text, name, action) => el("button", { type: "button", class: "quiet small", "aria-label": name, disabled: running, onclick: action }, text);
  const copy = el("button", { type: "button", class: "quiet small", "aria-label": "Copy the message" }, "Copy");
  const calls = (message.calls || []).map(call => `${call.name}(${call.arguments})`);
  copy.addEventListener("click", () => copied(copy, [message.content, ...calls].filter(Boolean).join("\n")));
  return el("div", { class: "foot" },
    copy,
    act.edit && button("Edit", "Edit the message", act.edit),
    act.regenerate && message.role === "assistant" && button("Regenerate", "Regenerate the answer", act.regenerate),
    el("span", { class: "figures" }, figures(message)));
}

/** Tokens, times and why it ended, in words. */
function figures(message) {
  const parts = [];
  if (message.spent) parts.push(`${message.spent} token${message.spent === 1 ? "" : "s"}`);
  if (message.firstMs !== undefined) parts.push(`first after ${Math.round(message.firstMs)} ms`);
  const rest = message.ms - message.firstMs;
  if (message.spent > 1 && rest > 0) parts.push(`${((message.spent - 1) / rest * 1000).toFixed(0)} tokens/s`);
  if (ENDS[message.finish]) parts.push(ENDS[message.finish]);
  return parts.join(" · ");
}

/** A form in place of a message, to edit it. `done(text, again)`: text is null where nothing is to change. */
export function editor(message, done) {
  const area = el("textarea", { rows: Math.min(12, message.content.split("\n").length + 2), value: message.content, "aria-label": "Message" });
  const isUser = message.role === "user";
  const save = again => () => done(area.value, again);
  const form = el("div", { class: "editor" }, area, el("div", { class: "row end" },
    el("button", { type: "button", class: "quiet", onclick: () => done(null) }, "Cancel"),
    el("button", { type: "button", class: isUser ? "" : "primary", onclick: save(false) }, "Save"),
    isUser && el("button", { type: "button", class: "primary", onclick: save(true) }, "Save and ask again")));
  form.addEventListener("keydown", event => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    done(null);
  });
  queueMicrotask(() => area.focus());
  return form;
}
