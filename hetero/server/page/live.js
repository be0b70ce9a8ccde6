// The machine's side of the page: listens to /live while it can be seen, and shows what comes.

import { Failure, ask, events } from "./api.js";
import { cellAt, heat, lanes, sparkline } from "./charts.js";

const TIERS = { gpu: "GPU memory", ram: "RAM", pcie: "PCIe", disk: "Disk" };
const MINUTE = 150; // figures, at 0.4 seconds each
const RETRY_MS = [1000, 2000, 4000, 8000];

export class Live {
  // `find`: an element by its id; `onLink(kind, words)`: told how the connection is; `onModel(name)`.
  constructor(find, onLink, onModel) {
    this.find = find;
    this.onLink = onLink;
    this.onModel = onModel;
    this.lanes = ["gpu", "pcie", "cpu"];
    this.empty = {};
    this.steps = [];
    this.rows = [];
    this.cell = null;
    this.speeds = [];
    this.tops = {};
    this.wanted = false;
    this.abort = null;
    this.tries = 0;
    document.addEventListener("visibilitychange", () => this.update());
    new ResizeObserver(() => this.draw()).observe(find("machine"));
    this.watchHeat();
  }

  // Whether the figures are to be seen; without it nothing is asked of the server.
  want(wanted) {
    this.wanted = wanted;
    this.update();
  }

  // With another key, say.
  restart() {
    this.abort?.abort();
    this.abort = null;
    this.tries = 0;
    this.update();
  }

  update() {
    const on = this.wanted && document.visibilityState === "visible";
    if (on && !this.abort) this.listen();
    if (!on && this.abort) {
      this.abort.abort();
      this.abort = null;
    }
  }

  async listen() {
    const abort = new AbortController();
    this.abort = abort;
    let failure = new Failure("cut", "The server has closed the connection.");
    try {
      const answer = await ask("/live", { signal: abort.signal });
      for await (const { event, data } of events(answer)) {
        if (abort.signal.aborted) return;
        this.tries = 0;
        this.take(event, JSON.parse(data));
      }
    } catch (error) {
      if (error.name === "AbortError") return;
      failure = error;
    }
    if (this.abort !== abort) return;
    this.note(failure.message);
    if (failure.kind === "key") {
      this.onLink("key", "needs an API key");
      return;
    }
    this.onLink("gone", failure.kind === "loading" ? "not ready" : "no connection");
    const wait = RETRY_MS[Math.min(this.tries++, RETRY_MS.length - 1)];
    setTimeout(() => {
      if (this.abort !== abort) return;
      this.abort = null;
      this.update();
    }, wait);
  }

  take(event, body) {
    if (event === "fixed") {
      this.lanes = body.lanes;
      this.empty = body.gpu ? {} : { gpu: "none in use", pcie: "no transfers" };
      this.onModel(body.model);
      this.drawSteps();
    } else if (event === "steps") {
      this.steps = body.steps;
      this.drawSteps();
    } else if (event === "heat") {
      this.rows = body.rows;
      this.drawHeat();
    } else if (body.phase !== "ready") {
      const words = body.phase === "loading" ? "loading the model" : "shutting down";
      this.onLink("busy", words);
      this.note(`The server is ${words}.`);
    } else {
      this.onLink("good", body.running ? "working" : "idle");
      this.note("");
      this.figures(body);
    }
  }

  note(text) {
    const note = this.find("live-note");
    note.textContent = text;
    note.hidden = !text;
    this.find("machine").classList.toggle("stale", Boolean(text));
  }

  figures(now) {
    const set = (id, text) => {
      const node = this.find(id);
      if (node.textContent !== text) node.textContent = text;
    };
    set("tokens-s", now.tokens_s.toFixed(1));
    set("ttft", now.ttft_s === null ? "–" : seconds(now.ttft_s));
    set("prompt-s", now.prompt_tokens_s.toFixed(0));
    set("queue", `${now.running} of ${now.slots}`);
    set("waiting", now.waiting ? `${now.waiting} waiting` : "none waiting");
    set("hit-rate", now.hit_rate === null ? "–" : `${(now.hit_rate * 100).toFixed(1)}%`);
    set("hit-note", now.hit_rate === null ? "no GPU cache" : "of experts, in the faster memory");
    this.speeds = [...this.speeds, now.tokens_s].slice(-MINUTE);
    const { shares } = now;
    if (shares.step_ms !== null) {
      const parts = [`${shares.step_ms.toFixed(1)} ms a step`, `CPU experts ${percent(shares.experts)}`, `dense ${percent(shares.dense)}`];
      if (shares.pcie) parts.push(`PCIe ${percent(shares.pcie)}`);
      set("shares", parts.join(" · "));
    }
    this.bytes(now.bytes_s);
    this.memory(now);
    this.drawSpeeds();
  }

  bytes(rates) {
    const rows = Object.entries(TIERS).map(([tier, name]) => {
      const rate = rates[tier];
      this.tops[tier] = Math.max(this.tops[tier] ?? 0, rate ?? 0);
      const top = Math.max(...Object.values(this.tops), 1);
      return { name, value: rate === null ? "no GPU" : `${size(rate)}/s`, share: (rate ?? 0) / top };
    });
    bars(this.find("bytes").tBodies[0], rows);
  }

  memory(now) {
    const target = this.find("memory");
    const wanted = [...now.memory.map((tier) => tier.tier), "KV"];
    if (target.dataset.tiers !== wanted.join()) {
      target.replaceChildren(...wanted.map(() => meter()));
      target.dataset.tiers = wanted.join();
    }
    now.memory.forEach((tier, place) => {
      const used = Object.values(tier.parts).reduce((sum, bytes) => sum + bytes, 0);
      const words = Object.entries(tier.parts).map(([name, bytes]) => `${name} ${size(bytes)}`);
      fillMeter(target.children[place], tier.tier, `${size(used)}, ${size(tier.free)} free`, Object.values(tier.parts), used + tier.free, words.join(" · "));
    });
    const { used, total } = now.kv;
    const hits = now.prefix.hits ? `${now.prefix.hits} prompt tokens reused` : "";
    fillMeter(target.lastElementChild, "Keys and values", `${used} of ${total} tokens`, [used], total, hits);
  }

  draw() {
    this.drawSpeeds();
    this.drawSteps();
    this.drawHeat();
  }

  drawSpeeds() {
    sparkline(this.find("spark"), this.speeds, MINUTE);
  }

  drawSteps() {
    lanes(this.find("lanes"), this.lanes, this.steps, this.empty);
  }

  drawHeat() {
    heat(this.find("heat"), this.rows, this.cell);
  }

  watchHeat() {
    const canvas = this.find("heat");
    const point = (cell) => {
      this.cell = cell;
      if (cell) {
        const row = this.rows[cell[0]];
        const share = row.use[cell[1]] / 1000;
        const times = Math.round((row.total / row.use.length) * share);
        this.find("heat-cell").textContent =
          `Layer ${row.layer}, expert ${cell[1]}: chosen ${times} times, ${share.toFixed(2)} of an even share`;
      }
      this.drawHeat();
    };
    canvas.addEventListener("pointermove", (event) => point(cellAt(canvas, this.rows, event)));
    canvas.addEventListener("pointerleave", () => point(null));
    canvas.addEventListener("blur", () => point(null));
    canvas.addEventListener("keydown", (event) => {
      const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!move || !this.rows.length) return;
      event.preventDefault();
      const [y, x] = this.cell ?? [0, 0];
      const first = this.cell === null;
      const row = clamp(first ? y : y + move[0], this.rows.length);
      point([row, clamp(first ? x : x + move[1], this.rows[row].use.length)]);
    });
  }
}

const clamp = (value, size) => Math.min(Math.max(value, 0), size - 1);
const percent = (share) => `${(share * 100).toFixed(0)}%`;

function seconds(value) {
  return value < 1 ? `${(value * 1000).toFixed(0)} ms` : `${value.toFixed(1)} s`;
}

function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const unit = Math.min(Math.max(Math.floor(Math.log10(Math.max(bytes, 1)) / 3), 0), units.length - 1);
  const value = bytes / 1000 ** unit;
  return `${value.toFixed(unit && value < 100 ? 1 : 0)} ${units[unit]}`;
}

// A table of a name, a bar and a value.
function bars(body, rows) {
  while (body.rows.length < rows.length) {
    const row = body.insertRow();
    const name = document.createElement("th");
    name.scope = "row";
    const bar = document.createElement("i");
    row.append(name);
    row.insertCell().append(bar);
    row.insertCell();
  }
  rows.forEach(({ name, value, share }, place) => {
    const [head, bar, text] = body.rows[place].cells;
    head.textContent = name;
    bar.firstChild.style.width = share > 0 ? `max(1px, ${(share * 100).toFixed(1)}%)` : "0";
    text.textContent = value;
  });
}

function meter() {
  const box = document.createElement("div");
  box.className = "meter";
  const head = document.createElement("p");
  head.append(document.createElement("strong"), document.createElement("span"));
  const bar = document.createElement("div");
  bar.className = "bar";
  const words = document.createElement("p");
  words.className = "sub";
  box.append(head, bar, words);
  return box;
}

function fillMeter(box, name, value, parts, total, words) {
  const [head, bar, under] = box.children;
  head.children[0].textContent = name;
  head.children[1].textContent = value;
  while (bar.children.length < parts.length) bar.append(document.createElement("i"));
  parts.forEach((part, place) => (bar.children[place].style.width = `${total ? (part / total) * 100 : 0}%`));
  under.textContent = words;
  under.hidden = !words;
}
