// The conversation: what is said, how it is shown, sending, stopping, trying again.

import { Failure, complete } from "./api.js";
import { copyText, show } from "./markdown.js";
import { loadChat, saveChat } from "./store.js";

const SAVE_MS = 500;
const LEAVING_MS = 2000;
const INTERRUPTED = "The page was reloaded before this answer ended.";

// Messages: {role, content, reasoning?, note?, failure?, open?}. `ui`: elements by name; `settings`: a function;
// `onKey`: called when the server asks for a key.
export class Chat {
  constructor(ui, settings, onKey) {
    this.ui = ui;
    this.settings = settings;
    this.onKey = onKey;
    this.messages = loadChat();
    this.abort = null;
    this.full = false;
    ui.composer.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    ui.prompt.addEventListener("keydown", (event) => {
      // While an input method composes a word, Enter belongs to it.
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    ui.prompt.addEventListener("input", () => this.fit());
    ui.stop.addEventListener("click", () => this.stop());
    // A page that is left breaks its own connections; that is no failure of the server.
    this.left = -Infinity;
    for (const event of ["beforeunload", "pagehide"]) addEventListener(event, () => (this.left = performance.now()));
    this.draw();
  }

  get busy() {
    return this.abort !== null;
  }

  send() {
    const text = this.ui.prompt.value.trim();
    if (!text || this.busy) return;
    this.ui.prompt.value = "";
    this.fit();
    this.dropFailure();
    this.messages.push({ role: "user", content: text });
    this.answer();
  }

  // Once more from the last thing that the user said.
  again() {
    if (this.busy) return;
    if (this.messages.at(-1)?.role === "assistant") this.messages.pop();
    if (this.messages.length) this.answer();
  }

  stop() {
    this.abort?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    saveChat(this.messages);
    this.draw();
    this.ui.prompt.focus();
  }

  // A message that was never answered would be sent again with the next one.
  dropFailure() {
    const last = this.messages.at(-1);
    if (last?.role === "assistant" && !last.content) this.messages.pop();
  }

  async answer() {
    const mine = { role: "assistant", content: "", reasoning: "" };
    const history = this.forServer();
    const conversation = this.messages;
    conversation.push(mine);
    const abort = new AbortController();
    this.abort = abort;
    this.draw();
    this.say("Answering");
    const began = performance.now();
    let first = null;
    let usage = null;
    let finish = null;
    let saved = began;
    try {
      for await (const delta of complete(history, this.settings(), abort.signal)) {
        if (delta.content || delta.reasoning) first ??= performance.now();
        mine.content += delta.content ?? "";
        mine.reasoning += delta.reasoning ?? "";
        finish = delta.finish ?? finish;
        usage = delta.usage ?? usage;
        this.refresh(mine);
        if (performance.now() - saved > SAVE_MS && conversation === this.messages) {
          this.keep(INTERRUPTED);
          saved = performance.now();
        }
      }
      mine.note = facts(usage, began, first, finish);
      this.say("The answer is complete");
    } catch (error) {
      if (performance.now() - this.left < LEAVING_MS) {
        mine.note = INTERRUPTED;
      } else if (error.name === "AbortError") {
        mine.note = "Stopped.";
        this.say("Stopped");
      } else {
        const failure = error instanceof Failure ? error : new Failure("cut", `The page failed: ${error.message}`);
        mine.failure = { kind: failure.kind, message: failure.message, until: Date.now() + failure.wait * 1000 };
        if (failure.kind === "key") this.onKey(failure.message);
      }
    } finally {
      if (this.abort === abort) this.abort = null;
      if (conversation === this.messages) {
        this.keep();
        this.draw();
      }
    }
  }

  // What the model is to see: no thoughts, no failed answers.
  forServer() {
    const said = this.messages.filter((each) => each.content).map(({ role, content }) => ({ role, content }));
    const { system } = this.settings();
    return system.trim() ? [{ role: "system", content: system }, ...said] : said;
  }

  // To the browser's storage; `note` stands in for the end of an answer that is still growing.
  keep(note = null) {
    const kept = this.messages.map(({ role, content, reasoning, note: own, failure }) => ({
      role, content, ...(reasoning && { reasoning }), ...(own && { note: own }),
      ...(failure && { failure: { ...failure, until: 0 } }),
    }));
    if (note && kept.length) kept.at(-1).note = note;
    this.full = !saveChat(kept);
  }

  draw() {
    const { log } = this.ui;
    const stays = this.atEnd();
    if (!this.messages.length) {
      const hello = element("p", "empty", "Nothing has been said yet.");
      hello.append(document.createElement("br"), "The conversation stays in this browser.");
      log.replaceChildren(hello);
    } else {
      log.replaceChildren(...this.messages.map((message, place) => this.view(message, place)));
    }
    this.ui.send.hidden = this.busy;
    this.ui.stop.hidden = !this.busy;
    log.setAttribute("aria-busy", String(this.busy));
    if (stays) this.toEnd();
  }

  view(message, place) {
    const box = element("article", message.role);
    box.setAttribute("aria-label", message.role === "user" ? "You" : "Model");
    const text = element("div", "text");
    const last = place === this.messages.length - 1;
    if (message.role === "user") {
      text.append(message.content);
      box.append(text);
      if (last && !this.busy) box.append(this.tools(message, true));
      return box;
    }
    const thoughts = element("details", "thoughts");
    thoughts.hidden = !message.reasoning;
    thoughts.open = Boolean(message.open);
    thoughts.addEventListener("toggle", () => (message.open = thoughts.open));
    thoughts.append(element("summary", "", "Reasoning"), element("div", "inner"));
    box.append(thoughts, text);
    this.fill(box, message);
    if (last && this.busy) box.append(element("p", "wait", message.content ? "" : "Reading the prompt"));
    if (message.note) box.append(element("p", "note", message.note));
    if (message.failure) box.append(this.failed(message.failure, last));
    if (!(last && this.busy)) box.append(this.tools(message, last));
    return box;
  }

  tools(message, last) {
    const bar = element("div", "tools");
    if (message.content) {
      const copy = button("Copy", () => copyText(message.content, copy));
      bar.append(copy);
    }
    if (last && !message.failure) bar.append(button(message.role === "user" ? "Answer" : "Regenerate", () => this.again()));
    return bar;
  }

  failed(failure, last) {
    const box = element("div", "alert");
    box.setAttribute("role", "alert");
    box.append(element("p", "", failure.message));
    if (!last) return box;
    const again = button("Try again", () => this.again());
    box.append(again);
    if (failure.kind === "long") box.append(button("New chat", () => this.clear()));
    const wait = () => {
      const left = Math.ceil((failure.until - Date.now()) / 1000);
      again.disabled = left > 0;
      again.textContent = left > 0 ? `Try again in ${left} s` : "Try again";
      if (left > 0 && (again.isConnected || !box.isConnected)) setTimeout(wait, 250);
    };
    wait();
    return box;
  }

  fill(box, message) {
    show(box.querySelector(".text"), message.content);
    if (message.reasoning) {
      const thoughts = box.querySelector(".thoughts");
      thoughts.hidden = false;
      show(thoughts.querySelector(".inner"), message.reasoning);
    }
  }

  // At most once a frame, however fast the tokens come.
  refresh(message) {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      const box = this.ui.log.lastElementChild;
      if (!this.busy || this.messages.at(-1) !== message || !box?.matches(".assistant")) return;
      const stays = this.atEnd();
      this.fill(box, message);
      const wait = box.querySelector(".wait");
      if (wait) wait.textContent = message.content ? "" : "Thinking";
      if (stays) this.toEnd();
    });
  }

  // Who has scrolled up to read is left there.
  atEnd() {
    const { log } = this.ui;
    return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  }

  toEnd() {
    this.ui.log.scrollTop = this.ui.log.scrollHeight;
  }

  fit() {
    const { prompt } = this.ui;
    prompt.style.height = "auto";
    prompt.style.height = `${Math.min(prompt.scrollHeight + 2, 220)}px`;
  }

  say(text) {
    this.ui.said.textContent = this.full ? `${text}. The browser has no room left to keep the conversation.` : text;
  }
}

function facts(usage, began, first, finish) {
  const parts = [];
  if (usage) {
    const made = usage.completion_tokens;
    const seconds = (performance.now() - (first ?? began)) / 1000;
    parts.push(made === 1 ? "1 token" : `${made} tokens`);
    if (made > 1 && seconds > 0) parts.push(`${((made - 1) / seconds).toFixed(1)} tokens/s`);
  }
  if (first !== null) parts.push(`first after ${((first - began) / 1000).toFixed(2)} s`);
  const ends = { length: "ended at the limit of tokens", deadline: "ended at the limit of time" };
  if (ends[finish]) parts.push(ends[finish]);
  return parts.join(" · ");
}

function element(tag, name = "", text = "") {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text) node.append(text);
  return node;
}

function button(text, act) {
  const node = element("button", "", text);
  node.type = "button";
  node.addEventListener("click", act);
  return node;
}
