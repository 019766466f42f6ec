// Settings and messages to a request of /v1/chat/completions, and its stream to a message.

import { ask, sse } from "../api.js";

/** Sampling parameters: the field's name, the least value, the step, and what it does. */
export const NUMBERS = [
  ["temperature", 0, 0.1, "0 is greedy"],
  ["top_p", 0, 0.05, "the likeliest tokens that make up this share"],
  ["top_k", -1, 1, "the k likeliest tokens"],
  ["min_p", 0, 0.01, "tokens at least this likely, beside the likeliest"],
  ["max_tokens", 1, 1, "tokens of an answer at most"],
  ["min_tokens", 0, 1, "tokens of an answer at least"],
  ["seed", 0, 1, "the same seed gives the same answer"],
  ["presence_penalty", -2, 0.1, "against tokens that were said"],
  ["frequency_penalty", -2, 0.1, "by how often they were said"],
  ["repetition_penalty", 0, 0.05, "1 is none; the prompt counts too"],
];

/** JSON of a field of the settings; undefined for an empty one. Throws Error that names the field. */
function parsed(text, name, isRight, what) {
  if (!(text || "").trim()) return undefined;
  let read;
  try {
    read = JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} is not valid JSON: ${error.message}`);
  }
  if (!isRight(read)) throw new Error(`${name} must be ${what}.`);
  return read;
}

const isObject = value => value !== null && typeof value === "object" && !Array.isArray(value);

/** The fields of a request that settings say. Throws Error for JSON that is none. */
export function fieldsOf(settings, params) {
  const body = {};
  for (const [name] of NUMBERS) {
    if (params[name] !== undefined && params[name] !== "") body[name] = Number(params[name]);
  }
  const stops = (params.stop || "").split("\n").filter(Boolean);
  if (stops.length) body.stop = stops;
  const tools = parsed(settings.tools, "Tools", Array.isArray, 'a list such as [{"type": "function", "function": {...}}]');
  if (tools?.length) body.tools = tools;
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  if (settings.model) body.model = settings.model;
  return Object.assign(body, parsed(settings.extra, "Other fields", isObject, "an object"));
}

/** Messages as the API takes them, after the system prompt. */
export function messagesOf(settings, messages) {
  const told = (settings.system || "").trim() ? [{ role: "system", content: settings.system }] : [];
  for (const each of messages) {
    const message = each.variants ? each.variants[0] : each;
    if (message.error && !message.content && !message.calls?.length) continue;
    const made = { role: message.role, content: message.content };
    if (message.calls?.length) {
      made.tool_calls = message.calls.map(call => ({
        id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
      }));
    }
    if (message.reasoning) made.reasoning = message.reasoning; // the chat template says which thoughts the model sees again
    if (message.role === "tool") made.tool_call_id = message.call;
    told.push(made);
  }
  return told;
}

/** Ask, and write the answer into `message` as it comes; `changed()` after each part. Never throws: what goes wrong is
 * `message.error`. */
export async function generate(body, message, signal, changed) {
  const began = performance.now();
  try {
    const asked = { ...body, stream: true, stream_options: { include_usage: true } };
    const response = await ask("v1/chat/completions", { body: asked, signal });
    for await (const data of sse(response)) {
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message || String(chunk.error));
      if (chunk.usage) message.spent = chunk.usage.completion_tokens;
      if (chunk.choices?.length) {
        if (message.firstMs === undefined && hasText(chunk.choices[0])) message.firstMs = performance.now() - began;
        take(message, chunk.choices[0]);
        changed();
      }
    }
    if (!message.finish) throw new Error("The stream ended before the answer did; regenerate it to ask again.");
  } catch (error) {
    if (signal.aborted) message.finish = "stopped";
    else if (error instanceof TypeError) message.error = "The server cannot be reached; is it running?";
    else message.error = error.message;
  }
  message.ms = performance.now() - began;
}

const hasText = ({ delta = {} }) => Boolean(delta.content || delta.reasoning || delta.tool_calls);

function take(message, choice) {
  const delta = choice.delta || {};
  message.content += delta.content || "";
  const thought = delta.reasoning ?? delta.reasoning_content;
  if (thought) message.reasoning = (message.reasoning || "") + thought;
  for (const part of delta.tool_calls || []) {
    message.calls ??= [];
    const call = (message.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id ||= part.id || "";
    call.name += part.function?.name || "";
    call.arguments += part.function?.arguments || "";
  }
  for (const token of choice.logprobs?.content || []) {
    message.tokens ??= [];
    message.tokens.push({
      bytes: bytesOf(token), logprob: token.logprob,
      top: (token.top_logprobs || []).map(each => ({ bytes: bytesOf(each), logprob: each.logprob })),
    });
  }
  if (choice.finish_reason) message.finish = choice.finish_reason;
}

const bytesOf = token => token.bytes || [...new TextEncoder().encode(token.token)];

/** The text of tokens; a letter may be spread over several. */
export const textOf = tokens => new TextDecoder().decode(new Uint8Array(tokens.flatMap(token => token.bytes)));
