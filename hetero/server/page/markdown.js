// Markdown to DOM nodes. Text of a model only ever becomes text nodes and the elements below; no string of it is
// parsed as HTML, and a link goes to http, https or mailto alone. Pictures become links: a page that loaded
// them would tell their host what was said.

// How deep blocks, links and emphasis may nest; what goes deeper stays text.
const DEPTH = 8;
const OPENERS = 100;

function make(tag, ...children) {
  const node = document.createElement(tag);
  node.append(...children);
  return node;
}

// Shows `text` in `target`. Blocks that have not changed keep their nodes, so that a selection in them and their
// place on the screen stay while an answer grows.
export function show(target, text) {
  const blocks = split(text.replaceAll("\r\n", "\n").split("\n"));
  const old = target.blocks ?? [];
  let same = 0;
  while (same < old.length && same < blocks.length && old[same] === blocks[same].source) same += 1;
  while (target.childNodes.length > same) target.lastChild.remove();
  for (const block of blocks.slice(same)) target.append(block.node());
  target.blocks = blocks.map((block) => block.source);
}

// Lines to blocks: {source, node()}.
function split(lines, depth = 0) {
  const blocks = [];
  let at = 0;
  const take = (end, node) => {
    const source = lines.slice(at, end).join("\n");
    blocks.push({ source, node });
    at = end;
  };
  while (at < lines.length) {
    const line = lines[at];
    let found;
    if (!line.trim()) {
      at += 1;
    } else if ((found = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/.exec(line))) {
      fence(found);
    } else if ((found = /^ {0,3}(#{1,6})\s(.*)$/.exec(line))) {
      // The page has headings of its own above these.
      const level = Math.min(found[1].length + 2, 6);
      const text = found[2].trim().replace(/#+$/, "").trim();
      take(at + 1, () => make(`h${level}`, ...inline(text)));
    } else if (/^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/.test(line)) {
      take(at + 1, () => make("hr"));
    } else if (/^ {0,3}>/.test(line) && depth < DEPTH) {
      let end = at;
      while (end < lines.length && /^ {0,3}>/.test(lines[end])) end += 1;
      const inner = lines.slice(at, end).map((each) => each.replace(/^ {0,3}> ?/, ""));
      take(end, () => make("blockquote", ...split(inner, depth + 1).map((block) => block.node())));
    } else if (item(line) && depth < DEPTH) {
      list(item(line));
    } else if (isTable(lines, at)) {
      table();
    } else {
      paragraph();
    }
  }
  return blocks;

  function fence([, marks, language]) {
    let end = at + 1;
    const closing = new RegExp(`^ {0,3}${marks[0]}{${marks.length},}\\s*$`);
    while (end < lines.length && !closing.test(lines[end])) end += 1;
    const code = lines.slice(at + 1, end).join("\n");
    take(Math.min(end + 1, lines.length), () => codeBlock(code, language.trim().split(/\s/)[0]));
  }

  function list(first) {
    const isSibling = (other) =>
      other && other.ordered === first.ordered && other.indent >= first.indent && other.indent <= first.indent + 3;
    const items = [];
    let end = at;
    let loose = false;
    while (end < lines.length) {
      const next = item(lines[end]);
      if (!isSibling(next)) break;
      const body = [next.text];
      end += 1;
      while (end < lines.length) {
        const indent = /^\s*/.exec(lines[end])[0].length;
        if (!lines[end].trim()) {
          const after = lines[end + 1] ?? "";
          const within = after.trim() && /^\s*/.exec(after)[0].length >= next.width;
          if (!within && !isSibling(item(after))) break;
          loose = true;
          body.push("");
        } else if (indent >= next.width) {
          body.push(lines[end].slice(next.width));
        } else if (item(lines[end]) || body.at(-1) === "" || startsBlock(lines[end])) {
          break;
        } else {
          body.push(lines[end].trimStart());
        }
        end += 1;
      }
      items.push(body);
    }
    take(end, () => {
      const node = make(first.ordered ? "ol" : "ul");
      if (first.ordered && first.number !== 1) node.start = first.number;
      for (const body of items) {
        const inner = split(body, depth + 1).map((block) => block.node());
        // The text of a tight item stands in it without a paragraph.
        const bare = loose ? inner : inner.flatMap((each) => (each.tagName === "P" ? [...each.childNodes] : [each]));
        node.append(make("li", ...bare));
      }
      return node;
    });
  }

  function table() {
    const head = cells(lines[at]);
    const sides = cells(lines[at + 1]).map((rule) => (rule.endsWith(":") ? (rule.startsWith(":") ? "center" : "right") : ""));
    let end = at + 2;
    const rows = [];
    while (end < lines.length && lines[end].includes("|") && lines[end].trim()) rows.push(cells(lines[end++]));
    const row = (tag, texts) =>
      make("tr", ...head.map((_, place) => {
        const cell = make(tag, ...inline(texts[place] ?? ""));
        if (sides[place]) cell.className = `to-${sides[place]}`;
        return cell;
      }));
    take(end, () => {
      const inner = make("table", make("thead", row("th", head)), make("tbody", ...rows.map((texts) => row("td", texts))));
      const scroll = make("div", inner);
      scroll.className = "scroll";
      return scroll;
    });
  }

  function paragraph() {
    let end = at + 1;
    while (end < lines.length && lines[end].trim() && !startsBlock(lines[end]) && !isTable(lines, end)) end += 1;
    const text = lines.slice(at, end).join("\n").trim();
    take(end, () => make("p", ...inline(text)));
  }
}

function item(line) {
  const found = /^( *)(?:([-*+])|(\d{1,9})[.)])( +|$)(.*)$/.exec(line);
  if (!found) return null;
  const [, indent, bullet, number, space, text] = found;
  const width = indent.length + (bullet ?? `${number}.`).length + Math.min(Math.max(space.length, 1), 4);
  return { indent: indent.length, ordered: !bullet, number: Number(number), width, text };
}

function startsBlock(line) {
  return /^ {0,3}(`{3}|~{3}|#{1,6}\s|>|[-*+] |1[.)] )/.test(line) || /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/.test(line);
}

function isTable(lines, at) {
  const rule = lines[at + 1];
  return lines[at].includes("|") && rule !== undefined && rule.includes("-") && /^[\s|:-]+$/.test(rule)
    && cells(rule).length === cells(lines[at]).length;
}

function cells(line) {
  const bare = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return bare.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function codeBlock(code, language) {
  const text = make("code", code);
  const copy = make("button", "Copy");
  copy.type = "button";
  copy.className = "copy";
  copy.addEventListener("click", () => copyText(code, copy));
  const bar = make("div", make("span", language || "text"), copy);
  bar.className = "bar";
  const pre = make("pre", text);
  pre.tabIndex = 0;
  const box = make("div", bar, pre);
  box.className = "code";
  return box;
}

// Copies, and says on the button that it has. Over plain HTTP to another machine browsers have no clipboard API.
export async function copyText(text, button) {
  const label = button.textContent;
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = make("textarea");
    area.value = text;
    area.className = "sr";
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.textContent = done ? "Copied" : "Cannot copy";
  setTimeout(() => (button.textContent = label), 1500);
}

// Text within a block to nodes.
function inline(text, depth = 0) {
  const out = new Spans();
  let at = 0;
  while (at < text.length) {
    const char = text[at];
    if (char === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      out.text(text[at + 1]);
      at += 2;
    } else if (char === "`") {
      const marks = run(text, at, "`");
      const end = closingTicks(text, at + marks, marks);
      if (end < 0) {
        out.text(text.slice(at, at + marks));
        at += marks;
      } else {
        const code = text.slice(at + marks, end).replaceAll("\n", " ");
        const padded = code.startsWith(" ") && code.endsWith(" ") && code.trim();
        out.node(make("code", padded ? code.slice(1, -1) : code));
        at = end + marks;
      }
    } else if ((char === "[" || (char === "!" && text[at + 1] === "[")) && depth < DEPTH) {
      const found = link(text, at + (char === "!" ? 1 : 0), depth);
      if (found) out.node(found.node);
      else out.text(char);
      at = found ? found.end : at + 1;
    } else if (char === "<" || char === "h") {
      const found = address(text, at);
      const node = found && anchor(found[1], [document.createTextNode(found[1])]);
      if (node) out.node(node);
      else out.text(char);
      at += node ? found[0].length : 1;
    } else if (char === "*" || char === "_" || char === "~") {
      const count = run(text, at, char);
      out.marks(char, count, text[at - 1] ?? " ", text[at + count] ?? " ");
      at += count;
    } else if (char === "\n") {
      out.node(make("br"));
      at += 1;
    } else {
      out.text(char);
      at += 1;
    }
  }
  return out.nodes;
}

// <address>, or one that stands bare in the text.
function address(text, at) {
  const rest = text.slice(at, at + 2000);
  if (rest[0] === "<") return /^<((?:https?:\/\/|mailto:)[^\s<>]+)>/.exec(rest);
  if (/\w/.test(text[at - 1] ?? "")) return null;
  return /^(https?:\/\/[^\s<>()[\]"'`]*[^\s<>()[\]"'`.,;:!?*_~])/.exec(rest);
}

// Nodes in a row, and emphasis among them by CommonMark's rules, except that marks next to punctuation may
// open and close as well: Chinese and Japanese need that. Each mark is looked at once, so time is linear.
class Spans {
  nodes = [];
  openers = [];
  // Kind of closing mark -> how many openers are known not to fit it.
  hopeless = new Map();

  text(text) {
    const last = this.nodes.at(-1);
    if (last?.nodeType === Node.TEXT_NODE && last !== this.openers.at(-1)?.node) last.data += text;
    else this.nodes.push(document.createTextNode(text));
  }

  node(node) {
    this.nodes.push(node);
  }

  marks(char, count, before, after) {
    const word = /[\p{L}\p{N}_]/u;
    // Underscores within words are part of names.
    const within = char === "_" && word.test(before) && word.test(after);
    const open = !/\s/.test(after) && !within;
    const close = !/\s/.test(before) && !within;
    let left = count;
    while (close && left) {
      const place = this.opener(char, left, count, open);
      if (place < 0) break;
      left -= this.wrap(place, left);
    }
    if (!left) return;
    const node = document.createTextNode(char.repeat(left));
    this.nodes.push(node);
    if (open && this.openers.length < OPENERS) {
      this.openers.push({ char, count, left, close, node, place: this.nodes.length - 1 });
    }
  }

  // Place of the opener that a closing run fits, or -1.
  opener(char, left, count, open) {
    const kind = `${char}${open}${count % 3}${left > 1}`;
    const least = this.hopeless.get(kind) ?? 0;
    for (let place = this.openers.length - 1; place >= least; place -= 1) {
      const each = this.openers[place];
      if (each.char !== char) continue;
      if (char === "~" && (each.left < 2 || left < 2)) continue;
      const odd = (each.close || open) && (each.count + count) % 3 === 0 && each.count % 3 !== 0;
      if (!odd) return place;
    }
    this.hopeless.set(kind, this.openers.length);
    return -1;
  }

  // What follows the opener becomes one element; returns how many marks that takes.
  wrap(place, left) {
    const opener = this.openers[place];
    const size = Math.min(opener.left, left, 2);
    const tag = opener.char === "~" ? "s" : size === 2 ? "strong" : "em";
    const node = make(tag, ...this.nodes.splice(opener.place + 1));
    opener.left -= size;
    opener.node.data = opener.char.repeat(opener.left);
    if (!opener.left) this.nodes.pop();
    this.openers.length = opener.left ? place + 1 : place;
    for (const [kind, least] of this.hopeless) this.hopeless.set(kind, Math.min(least, this.openers.length));
    this.nodes.push(node);
    return size;
  }
}

function run(text, at, char) {
  let end = at;
  while (text[end] === char) end += 1;
  return end - at;
}

function closingTicks(text, from, marks) {
  for (let at = text.indexOf("`", from); at >= 0; at = text.indexOf("`", at)) {
    const length = run(text, at, "`");
    if (length === marks) return at;
    at += length;
  }
  return -1;
}

// [words](address), `at` on the bracket.
function link(text, at, depth) {
  let open = 0;
  for (let end = at; end < text.length && end < at + 2000; end += 1) {
    if (text[end] === "\\") end += 1;
    else if (text[end] === "[") open += 1;
    else if (text[end] === "]" && --open === 0) {
      const target = /^\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/.exec(text.slice(end + 1, end + 4000));
      if (!target) return null;
      const words = inline(text.slice(at + 1, end), depth + 1);
      const node = anchor(target[1], words.length ? words : [document.createTextNode(target[1])]);
      return node && { node, end: end + 1 + target[0].length };
    }
  }
  return null;
}

function anchor(address, words) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return null;
  const node = make("a", ...words.map((word) => (word.nodeName === "A" ? document.createTextNode(word.textContent) : word)));
  node.href = url.href;
  node.target = "_blank";
  node.rel = "noopener noreferrer nofollow";
  return node;
}
