// The shell: two views behind tabs, the theme, and the key.

import { isRemembered, key, setKey } from "./api.js";

const byId = id => document.getElementById(id);
const VIEWS = { chat: () => import("./chat/main.js"), inside: () => import("./inside/main.js") };
const tabs = Object.keys(VIEWS).map(name => byId("tab-" + name));
let open = null; // { name, module } of the view that is shown
let wanted = null;

async function show(name) {
  if (wanted === name) return;
  wanted = name;
  for (const tab of tabs) {
    const chosen = tab.id === "tab-" + name;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    byId(tab.getAttribute("aria-controls")).hidden = !chosen;
  }
  document.title = name === "chat" ? "quire" : "quire: inside";
  if (open) open.module.unmount();
  open = null;
  try {
    const module = await VIEWS[name]();
    if (wanted !== name) return; // another tab was opened meanwhile
    open = { name, module };
    module.mount(byId(name + "-panel"));
  } catch (error) {
    wanted = null;
    byId(name + "-panel").textContent = `This view could not be loaded (${error.message}); reload the page.`;
  }
}

const named = () => (location.hash.slice(1) in VIEWS ? location.hash.slice(1) : "chat");
addEventListener("hashchange", () => {
  if (location.hash !== "#main-panel") show(named());
});

for (const tab of tabs) tab.addEventListener("click", () => (location.hash = tab.id.slice(4)));
document.querySelector("[role=tablist]").addEventListener("keydown", event => {
  const now = tabs.indexOf(document.activeElement);
  const next = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: tabs.length - 1 }[event.key];
  if (now < 0 || next === undefined) return;
  event.preventDefault();
  const tab = tabs[(next + tabs.length) % tabs.length];
  tab.focus();
  tab.click();
});

// ---------------------------------------------------------------- theme

const THEMES = { auto: "◐", light: "☀", dark: "☾" };

function paint(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme-button").textContent = THEMES[theme];
  byId("theme-button").title = `Theme: ${theme}`;
  byId("theme-button").setAttribute("aria-label", `Theme: ${theme}`);
  document.dispatchEvent(new CustomEvent("quire:theme", { detail: theme }));
}

byId("theme-button").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const theme = names[(names.indexOf(document.documentElement.dataset.theme || "auto") + 1) % names.length];
  try {
    localStorage.setItem("quire.theme", theme);
  } catch {
    // It lasts as long as the page.
  }
  paint(theme);
});
paint(document.documentElement.dataset.theme || "auto");

// ---------------------------------------------------------------- key

const dialog = byId("key-dialog");
const usual = byId("key-why").textContent;

function askForKey(why) {
  if (dialog.open) return;
  // Who has typed no key yet is told what happens to it.
  byId("key-why").textContent = why && key() ? why : why ? "This server needs an API key. " + usual : usual;
  byId("key-input").value = key();
  byId("key-keep").checked = isRemembered();
  dialog.returnValue = "";
  dialog.showModal();
}

byId("key-button").addEventListener("click", () => askForKey());
document.addEventListener("quire:key", event => askForKey(event.detail));
// Enter presses the first button of a form, which is Cancel: a key that was typed is meant.
byId("key-input").addEventListener("keydown", event => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  dialog.close("ok");
});
dialog.addEventListener("close", () => {
  if (dialog.returnValue !== "ok") return;
  setKey(byId("key-input").value.trim(), byId("key-keep").checked);
  document.dispatchEvent(new CustomEvent("quire:newkey")); // views ask again
});

show(named());
