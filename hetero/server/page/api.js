// Talking to the server: requests with the key, server-sent events over fetch, and failures in words.

import { loadKey } from "./store.js";

// A failure as a person reads it. `kind`: key, busy, long, gone, loading, refused or cut; `wait`: seconds after
// which it makes sense to try again.
export class Failure extends Error {
  constructor(kind, message, wait = 0) {
    super(message);
    this.kind = kind;
    this.wait = wait;
  }
}

const GONE =
  "The server cannot be reached. It may have stopped: start “hetero serve” again, then try again.";

export async function ask(path, options = {}) {
  const key = loadKey();
  const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    // A key with letters beyond Latin-1 cannot be a header; the browser says so by a TypeError as well.
    if (key && !/^[\x20-\x7e]*$/.test(key)) throw new Failure("key", "The API key has characters that no key has.");
    throw new Failure("gone", GONE);
  }
  if (!answer.ok) throw await refusal(answer);
  return answer;
}

async function refusal(answer) {
  let said = "";
  try {
    said = (await answer.json()).error?.message ?? "";
  } catch {
    // No JSON: something between here and the server has answered.
  }
  const wait = Number(answer.headers.get("retry-after")) || 0;
  const dot = said && !/[.!?]$/.test(said) ? `${said}.` : said;
  switch (answer.status) {
    case 401:
      return new Failure("key", loadKey() ? "The server does not accept this API key." : "This server asks for an API key.");
    case 429:
      return new Failure("busy", `The server is busy: ${dot || "too many requests are waiting."}`, wait || 1);
    case 413:
      return new Failure("long", `The conversation is too large for the server: ${dot}`);
    case 503:
      return new Failure("loading", dot ? `Not now: ${dot}` : "The server is not ready.", wait || 1);
  }
  if (answer.status === 400 && /context|memory for keys and values|takes at most/.test(said)) {
    return new Failure("long", `The conversation is longer than the model can hold: ${dot} Start a new chat, or ask for a shorter answer.`);
  }
  return new Failure("refused", `The server refused this (${answer.status}): ${dot || answer.statusText || "without a reason."}`);
}

// Yields {event, data} of a stream of server-sent events. Ends where the connection ends.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const fields = { event: "message", data: [] };
        for (const line of block.split(/\r?\n/)) {
          const [, name, text] = /^(event|data): ?(.*)$/.exec(line) ?? [];
          if (name === "event") fields.event = text;
          if (name === "data") fields.data.push(text);
        }
        if (fields.data.length) yield { event: fields.event, data: fields.data.join("\n") };
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("cut", "The connection to the server broke off.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

export async function modelName() {
  const body = await (await ask("/v1/models")).json();
  return body.data?.[0]?.id ?? "";
}

// Deltas of a streamed chat: {content}, {reasoning}, {finish}, {usage}.
export async function* complete(messages, settings, signal) {
  const body = {
    messages,
    stream: true,
    stream_options: { include_usage: true },
    temperature: settings.temperature,
  };
  if (settings.maxTokens !== null) body.max_tokens = settings.maxTokens;
  const answer = await ask("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  let ended = false;
  for await (const { data } of events(answer)) {
    if (data === "[DONE]") {
      ended = true;
      continue;
    }
    let chunk;
    try {
      chunk = JSON.parse(data);
    } catch {
      throw new Failure("cut", "The server sent something that is no answer.");
    }
    if (chunk.error) throw new Failure("cut", `The answer broke off: ${chunk.error.message}.`);
    const choice = chunk.choices?.[0];
    if (choice?.delta?.reasoning_content) yield { reasoning: choice.delta.reasoning_content };
    if (choice?.delta?.content) yield { content: choice.delta.content };
    if (choice?.finish_reason) yield { finish: choice.finish_reason };
    if (chunk.usage) yield { usage: chunk.usage };
  }
  if (!ended) throw new Failure("cut", "The connection ended before the answer did.");
}
