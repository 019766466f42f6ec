// The chat: conversations, the thread, what is being written, and the settings it is asked with.

import { json } from "../api.js";
import { el, keep, kept } from "../dom.js";
import { editor, messageView } from "./message.js";
import { fieldsOf, generate, messagesOf, textOf } from "./request.js";
import { settingsView } from "./settings.js";
import { sidebarView } from "./sidebar.js";
import * as store from "./store.js";

let view = null; // nodes, while the tab is open
let chat = null; // the conversation that is shown
let running = null; // { chat, message, controller } while an answer is written
let spoken = 0; // characters of the answer that screen readers were given

export function mount(element) {
  chat ??= store.all()[0] || store.fresh(kept("settings", {}));
  view = layout();
  element.replaceChildren(view.root);
  document.addEventListener("quire:newkey", loadModels);
  addEventListener("pagehide", saveRunning);
  loadModels();
  show();
}

export function unmount() {
  document.removeEventListener("quire:newkey", loadModels);
  removeEventListener("pagehide", saveRunning);
  view = null;
}

const saveRunning = () => running && store.save(running.chat);

function layout() {
  const side = el("nav", { class: "side", id: "chat-side", "aria-label": "Conversations" });
  const settings = el("section", { class: "settings", id: "chat-settings", "aria-label": "Settings" });
  const thread = el("div", { class: "thread", tabindex: 0, role: "region", "aria-label": "Messages" });
  const live = el("div", { class: "hidden-text", "aria-live": "polite" });
  const note = el("p", { class: "notice", role: "status", hidden: true });
  const input = el("textarea", { rows: 1, placeholder: "Ask something", "aria-label": "Your message", id: "chat-input" });
  const send = el("button", { type: "button", class: "primary", id: "chat-send" }, "Send");
  const models = el("select", { "aria-label": "Model", id: "chat-model" });
  const opens = (panel, text) => {
    const button = el("button", { type: "button", class: "quiet", "aria-controls": panel.id, "aria-expanded": "false" }, text);
    button.addEventListener("click", () => {
      const isOpen = root.classList.contains("with-" + panel.className);
      closePanels(); // one at a time: they would lie one on the other
      if (isOpen) return;
      root.classList.add("with-" + panel.className);
      button.setAttribute("aria-expanded", "true");
      panel.querySelector("button, input, textarea")?.focus();
    });
    return button;
  };
  const bar = el("div", { class: "bar-top" }, opens(side, "Chats"), models, opens(settings, "Settings"));
  const composer = el("div", { class: "composer" }, note, el("div", { class: "box" }, input, send));
  const root = el("div", { class: "chat" }, side, el("div", { class: "middle" }, bar, thread, composer, live), settings);
  input.addEventListener("input", () => {
    input.style.height = "auto";
    input.style.height = Math.min(input.scrollHeight + 2, 240) + "px";
  });
  input.addEventListener("keydown", event => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) submit();
    else if (running.chat !== chat) say(`“${running.chat.title}” is being answered: wait for it, or press Stop.`);
  });
  // Who goes on behind an open panel is done with it; nothing that has the focus may be covered.
  for (const behind of [thread, composer]) for (const event of ["pointerdown", "focusin"]) behind.addEventListener(event, closePanels);
  send.addEventListener("click", () => (running ? running.controller.abort() : submit()));
  root.addEventListener("keydown", event => {
    if (event.key === "Escape" && running) running.controller.abort();
    else if (event.key === "Escape") closePanels();
  });
  models.addEventListener("change", () => changed("model", models.value));
  return { root, side, settings, thread, live, note, input, send, models };
}

function closePanels() {
  for (const panel of [view.side, view.settings]) {
    const opener = view.root.querySelector(`[aria-controls=${panel.id}]`);
    if (panel.contains(document.activeElement)) opener.focus(); // what has the focus is about to go
  }
  view.root.classList.remove("with-side", "with-settings");
  for (const button of view.root.querySelectorAll(".bar-top [aria-expanded]")) button.setAttribute("aria-expanded", "false");
}

function changed(name, value) {
  if (name) chat.settings[name] = value;
  keep("settings", chat.settings); // a new chat begins with these
  store.save(chat);
  if (name === undefined) draw(); // tokens may be shown or not
}

async function loadModels() {
  let names = [];
  try {
    names = (await json("v1/models")).data.map(each => each.id);
  } catch (error) {
    say(error.status === 401 ? "This server needs an API key: press “Key” above." : error.message, true);
  }
  if (!view || !names.length) return;
  if (!names.includes(chat.settings.model)) chat.settings.model = names[0];
  view.models.replaceChildren(...names.map(name => el("option", { value: name }, name.split("/").at(-1))));
  view.models.value = chat.settings.model;
  say("");
}

/** Tell something beside the conversation; "" takes it away. */
function say(text, isBad = false) {
  if (!view) return;
  view.note.textContent = text;
  view.note.hidden = !text;
  view.note.classList.toggle("bad", isBad);
}

const list = () => sidebarView(view.side, chat, { open, created: () => open(store.fresh(chat.settings)), deleted, say });

function show() {
  if (view.models.options.length && chat.settings.model) view.models.value = chat.settings.model;
  list();
  settingsView(view.settings, chat.settings, () => changed());
  draw();
  view.thread.scrollTop = view.thread.scrollHeight;
}

function open(conversation) {
  chat = conversation;
  if (running?.chat.id === chat.id) chat = running.chat;
  closePanels();
  say("");
  show();
  view.input.focus();
}

function deleted(id) {
  store.remove(id);
  if (running?.chat.id === id) running.controller.abort();
  open(store.all()[0] || store.fresh(chat.settings));
}

// ---------------------------------------------------------------- the thread

function draw() {
  if (!view) return;
  const atEnd = view.thread.scrollHeight - view.thread.scrollTop - view.thread.clientHeight < 80;
  const nodes = chat.messages.map((message, index) => shown(message, index));
  if (!nodes.length) nodes.push(el("p", { class: "empty" }, "What is said here stays in this browser."));
  if (view.thread.contains(document.activeElement)) view.thread.focus({ preventScroll: true }); // its button is about to go
  view.thread.replaceChildren(el("div", { class: "column" }, ...nodes));
  view.send.textContent = running ? "Stop" : "Send";
  if (atEnd) view.thread.scrollTop = view.thread.scrollHeight;
}

const isLive = message => running !== null && running.message === message;

function shown(message, index) {
  const act = {
    edit: () => edit(message, index),
    regenerate: () => run(index),
    replace: (at, token) => goOn(message, index, at, token),
    answer: results => {
      chat.messages.splice(index + 1, Infinity, ...results);
      run(chat.messages.length);
    },
    choose: which => {
      chat.messages[index] = message.variants[which];
      finished();
    },
  };
  const isLast = index === chat.messages.length - 1;
  const state = { running: running !== null, isLive: isLive(message), isLast, showTokens: chat.settings.logprobs };
  return messageView(message, act, state);
}

/** Draw what is being written anew, and nothing else. */
function redraw() {
  if (!view || running?.chat !== chat) return;
  const column = view.thread.firstChild;
  const atEnd = view.thread.scrollHeight - view.thread.scrollTop - view.thread.clientHeight < 80;
  const folds = [...column.lastChild.querySelectorAll("details")];
  const focused = folds.findIndex(each => each.contains(document.activeElement));
  column.lastChild.replaceWith(shown(running.message, chat.messages.length - 1));
  column.lastChild.querySelectorAll("details").forEach((each, index) => {
    each.open = folds[index]?.open || false;
    if (index === focused) each.firstChild.focus({ preventScroll: true });
  });
  if (atEnd) view.thread.scrollTop = view.thread.scrollHeight;
  speak(false);
}

/** Give screen readers the answer by whole sentences. */
function speak(isEnd) {
  const text = (running?.message.variants?.[0] || running?.message)?.content || "";
  const end = isEnd ? text.length : Math.max(...[". ", "! ", "? ", "\n"].map(mark => text.lastIndexOf(mark))) + 1;
  if (end <= spoken) return;
  view?.live.append(el("p", {}, text.slice(spoken, end)));
  spoken = end;
}

function edit(message, index) {
  const form = editor(message, (text, again) => {
    if (text !== null && text !== message.content) {
      message.content = text;
      delete message.tokens;
    }
    store.save(chat);
    draw();
    if (again && text !== null) run(index + 1);
  });
  view.thread.firstChild.children[index].replaceChildren(form);
}

// ---------------------------------------------------------------- asking

function submit() {
  const text = view.input.value.trim();
  if (!text) return view.input.focus();
  chat.messages.push({ role: "user", content: text });
  if (!chat.named && chat.title === "New chat") chat.title = text.split("\n")[0].slice(0, 48);
  if (run(chat.messages.length)) {
    view.input.value = "";
    view.input.style.height = "auto";
  } else chat.messages.pop(); // the text is still in the box
}

/** Answer the first `count` messages; those after them go. False where the settings are wrong, which is told. */
function run(count) {
  if (running) return false;
  const messages = chat.messages.slice(0, count);
  let bodies;
  try {
    const { a, b, compare } = chat.settings;
    bodies = (compare ? [a, b] : [a]).map(params => fieldsOf(chat.settings, params || {}));
  } catch (error) {
    say(error.message, true);
    return false;
  }
  for (const [index, message] of messages.entries()) if (message.variants) messages[index] = message.variants[0];
  const asked = messagesOf(chat.settings, messages);
  if (bodies.length === 2) {
    const seed = bodies[0].seed ?? Math.floor(Math.random() * 2 ** 31);
    bodies = bodies.map(body => ({ ...body, seed }));
  }
  const answers = bodies.map(() => ({ role: "assistant", content: "" }));
  chat.messages = [...messages, answers.length === 1 ? answers[0] : { role: "assistant", content: "", variants: answers }];
  start(bodies.map(body => ({ ...body, messages: asked })), answers);
  return true;
}

/** Take another token at a place of an answer, and let the model go on from there. */
function goOn(message, index, at, token) {
  if (running) return;
  const tokens = [...message.tokens.slice(0, at), { ...token, top: message.tokens[at].top }];
  const said = textOf(tokens);
  const answer = { role: "assistant", content: "", tokens };
  let body;
  try {
    body = fieldsOf(chat.settings, chat.settings.a || {});
  } catch (error) {
    return say(error.message, true);
  }
  const before = chat.messages;
  const messages = messagesOf(chat.settings, [...before.slice(0, index), { role: "assistant", content: said }]);
  chat.messages = [...before.slice(0, index), answer];
  // The server tells what was said again, as what it is: thoughts, text and calls.
  const goesOn = { messages, add_generation_prompt: false, continue_final_message: true, echo: true };
  start([{ ...body, ...goesOn }], [answer], message.content.startsWith(said) ? said.length : 0, before);
}

/** Ask. `heard`: characters that screen readers have been given; `before`: the messages to go back to where no answer
 * begins. */
async function start(bodies, answers, heard = 0, before = null) {
  const mine = { chat, message: chat.messages.at(-1), controller: new AbortController() };
  running = mine;
  spoken = heard;
  say("");
  view.live.replaceChildren();
  list();
  draw();
  view.thread.scrollTop = view.thread.scrollHeight;
  let isWaiting = false;
  const update = () => {
    if (isWaiting) return;
    isWaiting = true;
    requestAnimationFrame(() => {
      isWaiting = false;
      if (running === mine) redraw();
    });
  };
  await Promise.all(bodies.map((body, index) => generate(body, answers[index], mine.controller.signal, update)));
  speak(true);
  running = null;
  const isRefused = before && answers[0].firstMs === undefined; // or stopped before its first word
  if (isRefused) mine.chat.messages = before;
  finished(mine.chat);
  if (isRefused && answers[0].error && mine.chat === chat) say(answers[0].error, true);
}

function finished(of = chat) {
  const isThere = of === chat || store.all().some(each => each.id === of.id);
  if (isThere && !store.save(of)) say("This browser keeps no more: the conversation will be gone with the tab. Export or delete some.", true);
  if (!view) return;
  list();
  draw(); // another chat too: while an answer is written nowhere else can one be asked for
}
