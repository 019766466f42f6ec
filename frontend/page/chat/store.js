// Conversations, kept in this browser: each under a key of its own, so that two tabs do not undo each other.

const PREFIX = "quire.chat.";
const ROLES = ["system", "user", "assistant", "tool"];

const newId = () => Date.now().toString(36) + "-" + Math.random().toString(36).slice(2, 8);

/** A conversation without messages, with the settings of another. */
export function fresh(settings = {}) {
  return { id: newId(), title: "New chat", updated: Date.now(), settings: structuredClone(settings), messages: [] };
}

/** All that are kept, the latest first. */
export function all() {
  return names().map(read).filter(Boolean).sort((a, b) => b.updated - a.updated);
}

function names() {
  try {
    return Object.keys(localStorage).filter(each => each.startsWith(PREFIX));
  } catch {
    return []; // a browser that keeps nothing
  }
}

function read(name) {
  try {
    return checked(JSON.parse(localStorage.getItem(name)));
  } catch {
    return null; // What cannot be read is left as it is.
  }
}

/** Keep a conversation as the latest; false where the browser keeps no more. */
export function save(conversation) {
  conversation.updated = Date.now();
  return put(conversation);
}

/** Keep a conversation in its place. */
export function put(conversation) {
  if (!conversation.messages.length) return true;
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return true;
  } catch {
    return false;
  }
}

export function remove(id) {
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // A browser that keeps nothing has none.
  }
}

/** What `Export` writes. */
export const exported = conversations => JSON.stringify({ quire: 1, conversations }, null, 1);

/** The conversations of an exported file, under new ids. Throws Error where it is none. */
export function imported(text) {
  let read = null;
  try {
    read = JSON.parse(text);
  } catch {
    // Told below.
  }
  const list = Array.isArray(read?.conversations) ? read.conversations.map(checked) : [];
  if (!list.length || list.includes(null)) throw new Error("This file holds no exported conversations; nothing was imported.");
  return list.map(each => ({ ...each, id: newId() }));
}

/** A conversation as this page needs it; null where it is none. */
function checked(found) {
  const fits = found && typeof found.title === "string" && Array.isArray(found.messages);
  if (!fits || !found.messages.every(isMessage)) return null;
  const { id, title, updated, settings, messages } = found;
  return { id: String(id), title, updated: Number(updated) || 0, settings: settingsOf(settings), messages, named: Boolean(found.named) };
}

const KINDS = { system: "string", tools: "string", extra: "string", model: "string", logprobs: "boolean", compare: "boolean" };

/** Settings of the kinds that this page writes. */
function settingsOf(found) {
  const some = (fields, isRight) => Object.fromEntries(Object.entries(fields || {}).filter(([name, value]) => isRight(typeof value, name)));
  const sampling = fields => some(fields, (kind, name) => kind === "string" || (kind === "number" && name !== "stop"));
  return { ...some(found, (kind, name) => kind === KINDS[name]), a: sampling(found?.a), b: sampling(found?.b) };
}

function isMessage(message) {
  if (!message || !ROLES.includes(message.role)) return false;
  if (message.variants) {
    return Array.isArray(message.variants) && message.variants.length === 2 && message.variants.every(each => !each?.variants && isMessage(each));
  }
  const { content, reasoning = "", calls = [], tokens = [] } = message;
  const isToken = token => Array.isArray(token?.bytes);
  return typeof content === "string" && typeof reasoning === "string" && Array.isArray(calls) && Array.isArray(tokens) &&
    calls.every(call => typeof call?.name === "string" && typeof call.arguments === "string") &&
    tokens.every(token => isToken(token) && Array.isArray(token.top) && token.top.every(isToken));
}
