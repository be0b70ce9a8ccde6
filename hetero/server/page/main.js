// Puts the parts together: views, settings, the chat and the live figures.

import { modelName } from "./api.js";
import { Chat } from "./chat.js";
import { Live } from "./live.js";
import { loadKey, loadSettings, saveKey, saveSettings } from "./store.js";

const find = (id) => document.getElementById(id);
const narrow = matchMedia("(max-width: 860px)");
const HELLO_MS = 3000;
let settings = loadSettings();

const chat = new Chat(
  Object.fromEntries(["log", "said", "composer", "prompt", "send", "stop"].map((id) => [id, find(id)])),
  () => settings,
  (message) => openSettings(message),
);
const live = new Live(find, showLink, (name) => showModel(name));

function showLink(kind, words) {
  find("link").dataset.kind = kind;
  if (find("link-text").textContent !== words) find("link-text").textContent = words;
}

function showModel(name) {
  find("model").textContent = name;
  document.title = name ? `${name} – hetero` : "hetero";
}

// Views. Wide windows show the chat, and the machine beside it or not; narrow ones show one of them.

function show(view) {
  document.body.dataset.view = view;
  find("show-chat").setAttribute("aria-pressed", String(view === "chat"));
  find("show-machine").setAttribute("aria-pressed", String(view === "machine"));
  layOut();
  chat.toEnd();
}

function layOut() {
  document.body.classList.toggle("alone", !settings.machine);
  find("toggle-machine").setAttribute("aria-expanded", String(settings.machine));
  live.want(narrow.matches ? document.body.dataset.view === "machine" : settings.machine);
  if (!live.wanted) hello();
}

// Without the live figures, the name of the model and the link come from a request.
async function hello() {
  try {
    showModel(await modelName());
    showLink("good", "connected");
  } catch (failure) {
    const words = { key: "needs an API key", loading: "not ready" };
    showLink(failure.kind === "loading" ? "busy" : failure.kind, words[failure.kind] ?? "no connection");
    if (failure.kind === "key") openSettings(failure.message);
    else setTimeout(() => live.wanted || hello(), HELLO_MS);
  }
}

find("show-chat").addEventListener("click", () => show("chat"));
find("show-machine").addEventListener("click", () => show("machine"));
find("toggle-machine").addEventListener("click", () => {
  settings.machine = !settings.machine;
  saveSettings(settings);
  layOut();
});
narrow.addEventListener("change", layOut);

find("new-chat").addEventListener("click", () => {
  if (!chat.messages.length || confirm("Forget this conversation?")) chat.clear();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chat.busy && !find("settings").open) {
    event.preventDefault();
    chat.stop();
    find("prompt").focus();
  }
});

// Settings.

const dialog = find("settings");

function openSettings(note = "") {
  if (dialog.open) return;
  find("key-note").textContent = note;
  find("key-note").hidden = !note;
  find("temperature").value = settings.temperature;
  find("max-tokens").value = settings.maxTokens ?? "";
  find("system").value = settings.system;
  find("key").value = loadKey();
  find("theme").value = settings.theme;
  dialog.showModal();
  if (note) find("key").focus();
}

find("open-settings").addEventListener("click", () => openSettings());
find("cancel-settings").addEventListener("click", () => dialog.close());
find("settings-form").addEventListener("submit", () => {
  settings = {
    ...settings,
    temperature: find("temperature").valueAsNumber,
    maxTokens: find("max-tokens").value ? find("max-tokens").valueAsNumber : null,
    system: find("system").value,
    theme: find("theme").value,
  };
  saveSettings(settings);
  const key = find("key").value.trim();
  if (key !== loadKey()) {
    saveKey(key);
    live.restart();
    layOut();
  }
  paint();
});

function paint() {
  document.documentElement.dataset.theme = settings.theme;
  live.draw();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => live.draw());
paint();
layOut();
chat.toEnd();
if (!narrow.matches) find("prompt").focus();
