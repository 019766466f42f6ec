// The settings of a conversation: system prompt, sampling, tools, and a second setting to compare with.

import { el } from "../dom.js";
import { NUMBERS } from "./request.js";

/** Fill `panel` with the fields of `settings`; `changed()` after each change. */
export function settingsView(panel, settings, changed) {
  settings.a ??= {};
  settings.b ??= {};
  const set = (holder, name, value) => {
    holder[name] = value;
    changed();
  };
  const area = (label, holder, name, rows, placeholder) => el("label", {}, label, el("textarea", {
    rows, placeholder, spellcheck: "false", value: holder[name] || "", name, oninput: event => set(holder, name, event.target.value),
  }));
  const check = (label, name, after) => el("label", { class: "check" }, el("input", {
    type: "checkbox", checked: Boolean(settings[name]), name,
    onchange: event => {
      set(settings, name, event.target.checked);
      after?.(event.target.checked);
    },
  }), label);
  const sampling = (title, which) => {
    const holder = settings[which];
    const numbers = NUMBERS.map(([name, min, step, hint]) => el("label", { title: hint }, name, el("input", {
      type: "number", min, step: "any", name, inputmode: "decimal", placeholder: "default",
      value: holder[name] ?? "", dataset: { step, of: which }, oninput: event => set(holder, name, event.target.value),
    })));
    return el("fieldset", { dataset: { of: which } }, el("legend", {}, title), el("div", { class: "numbers" }, ...numbers),
      area("stop, one a line", holder, "stop", 2));
  };
  const second = sampling("Sampling of B", "b");
  second.hidden = !settings.compare;
  const first = sampling(settings.compare ? "Sampling of A" : "Sampling", "a");
  panel.replaceChildren(
    area("System prompt", settings, "system", 3, "None of yours; the chat template may have its own"),
    check("Show the probabilities of tokens", "logprobs"),
    check("Compare two settings, with one seed", "compare", on => {
      second.hidden = !on;
      first.querySelector("legend").textContent = on ? "Sampling of A" : "Sampling";
    }),
    first,
    second,
    area("Tools, a JSON list", settings, "tools", 5, '[{"type": "function", "function": {"name": "weather"}}]'),
    area("Other fields of the request, a JSON object", settings, "extra", 3, '{"reasoning_effort": "low"}'),
  );
}
