// An answer's markdown as elements. `marked` reads it, and what it finds becomes elements of the kinds below and text.
// No HTML is made or read on the way: whatever a model writes, nothing else can come of it.

import { Lexer } from "./vendor/marked.esm.js";
import { element } from "./dom.js";

const DEEPEST = 10; // lists and quotes within each other that a phone has room for; deeper ones are shown as written

/**
 * Return the blocks of `source`, each {element, end}: the next one begins at `end`. `runs(start, end)` yields the
 * [length, origin] of the characters between them. With `open` more is to come: a caret is at the end, and what is
 * half written there is shown as what it is about to be.
 */
export function blocks(source, runs, open = false) {
  const shown = open ? completed(source) : source;
  const made = [];
  let start = 0;
  for (const token of lexed(shown)) {
    const end = start + token.raw.length;
    const nodes = new Block(token.raw, start, runs, open && end >= shown.length).nodes([token]);
    if (nodes.length) made.push({ element: nodes.length === 1 ? nodes[0] : element("p", {}, ...nodes), end });
    else if (made.length) made.at(-1).end = end; // blank lines
    start = end;
  }
  if (open && made.length) addCaret(made.at(-1).element);
  return made;
}

function lexed(source) {
  try {
    return Lexer.lex(source, { gfm: true, breaks: true });
  } catch { // nested more deeply than the stack is
    return [{ type: "html", block: true, raw: source }]; // shown as written
  }
}

/** A last line of marks alone may become a rule, a list, a heading: it waits. A table is one from its first line on. */
function completed(source) {
  const [above, last] = lastLine(source);
  const settled = above + last.replace(/^[-+*_=#`~|:> \t]*(?:\d+[.)]?)?$/, "").replace(/\*$(?<=\*\*[^*]+\*)/, "");
  const [before, head] = lastLine(settled.replace(/\n$/, ""));
  const isHead = head.startsWith("|") && !lastLine(before.slice(0, -1))[1].startsWith("|");
  if (!isHead || lexed(settled).at(-1).type !== "paragraph") return settled;
  const nCells = head.replace(/\|\s*$/, "").match(/(?<!\\)\|/g).length;
  return `${before}${head}\n|${"-|".repeat(nCells)}`;
}

function lastLine(text) {
  const start = text.lastIndexOf("\n") + 1;
  return [text.slice(0, start), text.slice(start)];
}

function addCaret(block) {
  const caret = element("span", { className: "caret", ariaHidden: "true" });
  const last = [...block.querySelectorAll("[data-origin]")].at(-1); // not in the empty cells of a row
  if (last) last.after(caret);
  else (block.querySelector("code") ?? block).append(caret);
}

/** One block of a text. Its words are looked for in the source again, for the origin of each of their characters. */
class Block {
  #depth = 0;
  #cursor = 0; // what is before it in `raw` is made

  constructor(raw, start, runs, open) {
    Object.assign(this, { raw, start, runs, open });
  }

  /** The nodes of `tokens`. */
  nodes(tokens) {
    this.#depth++;
    const made = tokens.flatMap((token) => this.#node(token));
    this.#depth--;
    return made;
  }

  #node(token) {
    const at = this.raw.indexOf(token.raw, this.#cursor); // -1 where the lexer took away a quote's or list's indent
    if (at >= 0) this.#cursor = at;
    const make = (this.#depth <= DEEPEST && KINDS[token.type]) || asWritten;
    const made = make(token, this);
    if (at >= 0) this.#cursor = at + token.raw.length;
    return made;
  }

  /** Words that are in the source as they are, but for what each line of a quote or a list begins with. */
  text(words) {
    return words.split(/(?<=\n)/).flatMap((line) => this.spans(line, line));
  }

  /** What the source has as `written`, in spans, each of one origin. */
  spans(shown, written) {
    const at = this.raw.indexOf(written, this.#cursor);
    if (at < 0) return [shown];
    this.#cursor = at + written.length;
    const runs = [...this.runs(this.start + at, this.start + this.#cursor)];
    if (shown !== written) return [span(shown, runs[0][1])];
    let start = 0;
    return runs.map(([length, origin]) => span(shown.slice(start, (start += length)), origin));
  }

  /** The words of a paragraph. At the end of an open text what was begun with ** or ` is bold or code already. */
  prose(words) {
    if (!this.open || this.#cursor + words.length < this.raw.trimEnd().length) return this.references(words);
    const [begun, mark, rest] = words.match(/(?<![\w*`])(\*\*?|`)(?=[^\s*`])([^*`]*)\*?$/) ?? [];
    if (!begun) return this.references(words.replace(/[*`]+$/, ""));
    return [...this.references(words.slice(0, -begun.length)), element(HALVES[mark], {}, ...this.text(rest))];
  }

  /** Words with character references, such as &amp;. */
  references(words) {
    return words.split(REFERENCE).flatMap((part, i) => (i % 2 ? this.spans(character(part), part) : this.text(part)));
  }
}

const HALVES = { "**": "strong", "*": "em", "`": "code" };
const REFERENCE = /(&(?:#\d{1,7}|#x[\da-f]{1,6}|[a-z]{2,6});)/i;
const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", deg: "°", times: "×",
  ndash: "–", mdash: "—", hellip: "…", rarr: "→", larr: "←", le: "≤", ge: "≥" };

/** The character that a reference stands for; the reference, where it is none of those that models write. */
function character(reference) {
  const name = reference.slice(1, -1);
  if (!name.startsWith("#")) return NAMED[name] ?? reference;
  const code = Number(name.replace(/^#(x?)/i, "0$1"));
  return code && code <= 0x10ffff ? String.fromCodePoint(code) : reference;
}

const decoded = (words) => words.split(REFERENCE).map((part, i) => (i % 2 ? character(part) : part)).join("");

function span(words, origin) {
  const made = element("span", {}, words);
  made.dataset.origin = origin;
  return made;
}

// ---- the kinds ----

const KINDS = {
  space: () => [],
  def: () => [],
  hr: () => element("hr"),
  br: () => element("br"),
  paragraph: (token, block) => (token.raw.trim() ? element("p", {}, ...block.nodes(token.tokens)) : []),
  // Below "Answer", an h2, an outline must not leave out a level, as answers do that begin with ###: only sizes differ.
  heading: (token, block) => element("h3", { className: `depth${token.depth}` }, ...block.nodes(token.tokens)),
  blockquote: (token, block) => element("blockquote", {}, ...block.nodes(token.tokens)),
  list,
  table,
  code,
  text: (token, block) => (token.tokens ? block.nodes(token.tokens) : block.prose(token.text)),
  escape: (token, block) => block.spans(token.text, token.raw),
  strong: (token, block) => element("strong", {}, ...block.nodes(token.tokens)),
  em: (token, block) => element("em", {}, ...block.nodes(token.tokens)),
  del: (token, block) => element("del", {}, ...block.nodes(token.tokens)),
  codespan: (token, block) => element("code", {}, ...block.text(token.text)),
  checkbox: (token) => (token.checked ? "\u2611 " : "\u2610 "),
  link: (token, block) => link(token, block.nodes(token.tokens)),
  image: (token, block) => link(token, ["Image: ", ...(token.text ? block.references(token.text) : [token.href])]),
  html: (token, block) => {
    if (/^<br\s*\/?>$/i.test(token.raw.trim())) return element("br"); // the only line break in a cell of a table
    return token.block ? element("p", {}, asWritten(token, block)) : block.text(token.raw);
  },
};

const asWritten = (token, block) => element("span", { className: "source" }, ...block.text(token.raw));

function list(token, block) {
  const items = token.items.map((item) => element("li", item.task ? { className: "task" } : {}, ...block.nodes(item.tokens)));
  return token.ordered ? element("ol", { start: token.start }, ...items) : element("ul", {}, ...items);
}

function table(token, block) {
  const row = (cells, tag) => element("tr", {}, ...cells.map((cell, i) => {
    const align = token.align[i] ?? "left";
    return element(tag, { className: align, ...(tag === "th" && { scope: "col" }) }, ...block.nodes(cell.tokens));
  }));
  const made = element("table", {}, element("thead", {}, row(token.header, "th")),
    element("tbody", {}, ...token.rows.map((cells) => row(cells, "td"))));
  return element("div", { className: "wide", tabIndex: 0, role: "group", ariaLabel: "Table" }, made);
}

function code(token, block) {
  if (token.codeBlockStyle !== "indented") block.text(token.raw.split("\n", 1)[0]); // the fence has an origin, too
  const language = (token.lang ?? "").split(/\s/, 1)[0];
  const lines = element("code", {}, ...block.text(token.text));
  return element("div", { className: "code" },
    element("div", { className: "bar" }, element("span", {}, language || "code"),
      element("button", { type: "button", className: "copy" }, "Copy")),
    element("pre", { tabIndex: 0, role: "group", ariaLabel: language ? `Code, ${language}` : "Code" }, lines));
}

/** An image is a link, too: what an answer names is only fetched where the reader asks for it. */
function link(token, words) {
  const address = safeAddress(token.autolink ? token.href : decoded(token.href));
  return address ? element("a", { href: address, rel: "noopener noreferrer", target: "_blank" }, ...words) : words;
}

function safeAddress(href) {
  try {
    const { href: address, protocol } = new URL(href);
    return ["http:", "https:", "mailto:"].includes(protocol) ? address : null;
  } catch {
    return null; // of this server, or none
  }
}
