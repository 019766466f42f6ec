// The list of conversations: open, rename, delete, export, import.

import { el } from "../dom.js";
import * as store from "./store.js";

/** Fill `panel`. `act`: open(conversation), created(), deleted(id), say(text). */
export function sidebarView(panel, current, act) {
  const list = store.all();
  if (!list.some(each => each.id === current.id)) list.unshift(current);
  const again = () => sidebarView(panel, current, act);
  const items = list.map(each => item(each.id === current.id ? current : each, each.id === current.id, act, panel, again));
  const file = el("input", { type: "file", accept: "application/json,.json", hidden: true, "aria-label": "File to import" });
  file.addEventListener("change", async () => {
    try {
      const found = store.imported(await file.files[0].text());
      if (!found.every(store.put)) throw new Error("This browser keeps no more conversations; delete some.");
      act.say(`Imported ${found.length} conversation${found.length === 1 ? "" : "s"}.`);
      again();
    } catch (error) {
      act.say(error.message, true);
    }
  });
  panel.replaceChildren(
    el("button", { type: "button", class: "new", onclick: act.created }, "New chat"),
    el("ul", { class: "chats" }, ...items),
    el("div", { class: "row" },
      el("button", { type: "button", class: "quiet", onclick: () => download(store.all()) }, "Export"),
      el("button", { type: "button", class: "quiet", onclick: () => file.click() }, "Import"), file),
  );
}

function item(conversation, isCurrent, act, panel, again) {
  const open = el("button", {
    type: "button", class: "open", "aria-current": isCurrent ? "true" : undefined, onclick: () => act.open(conversation),
  }, conversation.title);
  const row = el("li", {}, open);
  const rename = () => {
    const field = el("input", { value: conversation.title, "aria-label": "Title" });
    let isDone = false;
    const done = keeps => {
      if (isDone) return;
      isDone = true;
      if (keeps && field.value.trim()) conversation.title = field.value.trim();
      conversation.named = true;
      store.save(conversation);
      again();
    };
    field.addEventListener("blur", () => done(true));
    field.addEventListener("keydown", event => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.stopPropagation(); // Escape would close the panel, too
      done(event.key === "Enter");
      panel.querySelector(".open[aria-current]").focus();
    });
    row.replaceChildren(field);
    field.select();
  };
  // A second press deletes: what is deleted here is nowhere else.
  const erase = el("button", { type: "button", class: "quiet small", "aria-label": `Delete ${conversation.title}` }, "Delete");
  erase.addEventListener("click", () => {
    if (erase.dataset.sure) return act.deleted(conversation.id);
    erase.dataset.sure = "1";
    erase.textContent = "Delete?";
    erase.setAttribute("aria-label", `Press again to delete ${conversation.title}`);
  });
  erase.addEventListener("blur", () => {
    delete erase.dataset.sure;
    erase.textContent = "Delete";
  });
  const edit = el("button", { type: "button", class: "quiet small", "aria-label": `Rename ${conversation.title}`, onclick: rename }, "Rename");
  if (isCurrent && conversation.messages.length) row.append(el("div", { class: "row" }, edit, erase));
  return row;
}

function download(conversations) {
  const link = el("a", { href: URL.createObjectURL(new Blob([store.exported(conversations)], { type: "application/json" })) });
  link.download = "quire-chats.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
