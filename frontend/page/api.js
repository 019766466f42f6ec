// Requests to this server: its address, the key, errors in one line, and server-sent events.

/** The server's root, wherever a proxy has put it: this file is ROOT/page/api.js. */
const ROOT = new URL("..", import.meta.url);

export const url = path => new URL(path.replace(/^\//, ""), ROOT);

const stores = () => [sessionStorage, localStorage];

let typed = ""; // where the browser keeps nothing, the key lasts as long as the page

/** The key that the reader typed; "" for none. */
export function key() {
  try {
    return stores().map(store => store.getItem("quire.key")).find(Boolean) || typed;
  } catch {
    return typed;
  }
}

/** Keep a key for this tab, or with `remember` in this browser; "" forgets it. */
export function setKey(value, remember = false) {
  typed = value;
  try {
    const [session, local] = stores();
    for (const store of [session, local]) store.removeItem("quire.key");
    if (value) (remember ? local : session).setItem("quire.key", value);
  } catch {
    // It is in `typed`.
  }
}

export function isRemembered() {
  try {
    return Boolean(localStorage.getItem("quire.key"));
  } catch {
    return false;
  }
}

/** Headers of a request of data. */
export function headers() {
  const found = { "Content-Type": "application/json" };
  if (key()) found.Authorization = "Bearer " + key();
  return found;
}

/** Why a request was refused: `status` and the server's own line. */
export class Refused extends Error {
  constructor(status, message, param) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** The response to a request; `body` is told as JSON. Throws Refused, or TypeError where there is no server. */
export async function ask(path, { body, method, signal } = {}) {
  if (/[^\x20-\xff]/.test(key())) throw refused(401, "The key has a character that no HTTP header can hold; copy it again.");
  const response = await fetch(url(path), {
    method: method || (body === undefined ? "GET" : "POST"),
    headers: headers(),
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
  });
  if (response.ok) return response;
  const text = await response.text();
  let error = {};
  try {
    error = JSON.parse(text).error || {};
  } catch {
    // A proxy's page, say: the status tells what there is to tell.
  }
  const wrongKey = response.status === 401 && key(); // the server's words tell programs which header to send
  const why = wrongKey ? "The server does not take this key: copy it again, or ask whoever runs it for another." : error.message;
  throw refused(response.status, why || `The server answered with status ${response.status}.`, error.param);
}

/** What to throw; a 401 also asks the reader for a key. */
function refused(status, message, param) {
  if (status === 401) document.dispatchEvent(new CustomEvent("quire:key", { detail: message }));
  return new Refused(status, message, param);
}

export const json = async (path, options) => (await ask(path, options)).json();

/** The data of each server-sent event of a response, as text, up to `[DONE]` or the end. */
export async function* sse(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      waiting += done ? "\n\n" : value.replaceAll("\r", "");
      const events = waiting.split("\n\n");
      waiting = events.pop();
      for (const event of events) {
        const lines = event.split("\n").filter(line => line.startsWith("data:"));
        if (!lines.length) continue;
        const data = lines.map(line => line.slice(5).replace(/^ /, "")).join("\n");
        if (data === "[DONE]") return;
        yield data;
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
