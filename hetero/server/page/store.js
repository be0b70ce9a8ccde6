// What outlives a reload: the conversation and the settings in localStorage, the API key in sessionStorage.

const CHAT = "hetero.chat";
const SETTINGS = "hetero.settings";
const KEY = "hetero.key";

export const DEFAULTS = { temperature: 0.7, maxTokens: null, system: "", theme: "auto", machine: true };

// Storage may be full, switched off or hold what another version wrote; the page works without it.
function read(storage, name, otherwise) {
  try {
    const text = storage.getItem(name);
    return text === null ? otherwise : JSON.parse(text);
  } catch {
    return otherwise;
  }
}

function write(storage, name, value) {
  try {
    storage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

const isText = (value) => typeof value === "string";

function isMessage(value) {
  return value && isText(value.content) && (value.role === "user" || value.role === "assistant");
}

export function loadChat() {
  const found = read(localStorage, CHAT, []);
  return Array.isArray(found) ? found.filter(isMessage) : [];
}

// False when the browser has no room for it.
export function saveChat(messages) {
  return write(localStorage, CHAT, messages);
}

export function loadSettings() {
  const found = read(localStorage, SETTINGS, {});
  const settings = { ...DEFAULTS };
  if (found === null || typeof found !== "object") return settings;
  if (Number.isFinite(found.temperature)) settings.temperature = Math.min(Math.max(found.temperature, 0), 2);
  if (Number.isInteger(found.maxTokens) && found.maxTokens > 0) settings.maxTokens = found.maxTokens;
  if (isText(found.system)) settings.system = found.system;
  if (["light", "dark"].includes(found.theme)) settings.theme = found.theme;
  settings.machine = found.machine !== false;
  return settings;
}

export function saveSettings(settings) {
  write(localStorage, SETTINGS, settings);
}

export function loadKey() {
  const key = read(sessionStorage, KEY, "");
  return isText(key) ? key : "";
}

export function saveKey(key) {
  write(sessionStorage, KEY, key);
}
