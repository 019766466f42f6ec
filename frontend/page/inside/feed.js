// The feed of the server's state. It is asked for only while somebody can see the view, and again whenever it is lost.

import { Refused, ask, sse } from "../api.js";

const SILENT_MS = 6000; // no event for so long: the connection is dead, whatever the browser thinks
const WAITS_S = [0.5, 1, 2, 4, 8];

const sleep = (ms, signal) =>
  new Promise(done => {
    const timer = setTimeout(done, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), done()), { once: true });
  });

const newKey = signal =>
  new Promise(done => {
    document.addEventListener("quire:newkey", done, { once: true, signal });
    signal.addEventListener("abort", done, { once: true });
  });

/** Events until `signal` aborts. `tell(event)` takes each; `say(state, text)` is told "live", "lost" or "refused". */
export async function follow(signal, tell, say) {
  for (let failures = 0; !signal.aborted; ) {
    const attempt = new AbortController();
    const give = () => attempt.abort();
    signal.addEventListener("abort", give, { once: true });
    let watchdog = setTimeout(give, SILENT_MS);
    let state = ["lost", "Reconnecting"];
    try {
      const response = await ask("/dashboard/events", { signal: attempt.signal });
      for await (const data of sse(response)) {
        clearTimeout(watchdog);
        watchdog = setTimeout(give, SILENT_MS);
        failures = 0;
        tell(JSON.parse(data));
      }
    } catch (error) {
      if (error instanceof Refused) state = ["refused", error.message];
      if (error instanceof Refused && error.status === 401) {
        clearTimeout(watchdog);
        say(...state);
        await newKey(signal);
        continue;
      }
    } finally {
      clearTimeout(watchdog);
      signal.removeEventListener("abort", give);
    }
    if (signal.aborted) return;
    const wait = WAITS_S[Math.min(failures++, WAITS_S.length - 1)];
    say(...state);
    await sleep(1000 * wait, signal);
  }
}

/** Follow while the page is visible. Returns a function that ends it. */
export function followVisibly(tell, say) {
  let current = null;
  const look = () => {
    if (document.hidden) {
      current?.abort();
      current = null;
    } else if (!current) {
      current = new AbortController();
      follow(current.signal, tell, say);
    }
  };
  document.addEventListener("visibilitychange", look);
  look();
  return () => {
    document.removeEventListener("visibilitychange", look);
    current?.abort();
  };
}
