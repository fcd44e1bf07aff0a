// An answer's markdown as elements. The server reads it (markdown.py), and what it finds becomes elements of the kinds
// below and text. No HTML is made or read on the way: whatever a model writes, nothing else can come of it.

import { element } from "./dom.js";
import { markdownBlocks } from "./stream.js";

/**
 * Return the blocks of `source`, each {element, end}: the next one begins at `end`; and the `ms` that reading took.
 * `runs(start, end)` yields the [length, origin] of the characters between them. With `open` more is to come: a caret
 * is at the end, and what is half written there is shown as what it is about to be. Null where the server is gone.
 */
export async function blocks(source, runs, open = false) {
  const read = await markdownBlocks(source, open).catch(() => null);
  if (!read) return null;
  const made = [];
  let start = 0;
  for (const { raw, node } of read.blocks) {
    made.push({ element: new Block(raw, start, runs).node(node), end: (start += raw.length) });
  }
  if (open && made.length) addCaret(made.at(-1).element);
  return { made, ms: read.ms };
}

/** Return `source` as it is written, in one element. */
export function unread(source, runs) {
  return new Block(source, 0, runs).node({ kind: "source", text: source });
}

function addCaret(block) {
  const caret = element("span", { className: "caret", ariaHidden: "true" });
  const last = [...block.querySelectorAll("[data-origin]")].at(-1); // not in the empty cells of a row
  if (last) last.after(caret);
  else (block.querySelector("code") ?? block).append(caret);
}

/** One block of a text. Its words are looked for in the source again, for the origin of each of their characters. */
class Block {
  #cursor = 0; // what is before it in `raw` is made

  constructor(raw, start, runs) {
    Object.assign(this, { raw, start, runs });
  }

  node(node) {
    return typeof node === "string" ? this.text(node) : KINDS[node.kind](node, this);
  }

  /** The nodes within `node`. */
  within(node) {
    const at = node.raw ? this.raw.indexOf(node.raw, this.#cursor) : -1; // -1: it has a quote's or a list's marks within
    const made = node.children.flatMap((child) => this.node(child));
    if (at >= 0) this.#cursor = at + node.raw.length;
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
}

function span(words, origin) {
  const made = element("span", {}, words);
  made.dataset.origin = origin;
  return made;
}

// ---- the kinds ----

const KINDS = {
  hr: () => element("hr"),
  break: () => element("br"),
  paragraph: plain("p"),
  // Below "Answer", an h2, an outline must not leave out a level, as answers do that begin with ###: only sizes differ.
  heading: (node, block) => element("h3", { className: `depth${node.level}` }, ...block.within(node)),
  blockquote: plain("blockquote"),
  bullet_list: plain("ul"),
  ordered_list: (node, block) => element("ol", { start: node.start }, ...block.within(node)),
  list_item: (node, block) => (node.box
    ? element("li", { className: "task" }, node.box, ...block.within(node))
    : element("li", {}, ...block.within(node))),
  table: (node, block) => element("div", { className: "wide", tabIndex: 0, role: "group", ariaLabel: "Table" },
    element("table", {}, ...block.within(node))),
  thead: plain("thead"),
  tbody: plain("tbody"),
  tr: plain("tr"),
  th: (node, block) => element("th", { className: node.align, scope: "col" }, ...block.within(node)),
  td: (node, block) => element("td", { className: node.align }, ...block.within(node)),
  code,
  character: (node, block) => block.spans(node.text, node.raw),
  strong: plain("strong"),
  em: plain("em"),
  s: plain("del"),
  codespan: plain("code"),
  link: (node, block) => link(node, block.within(node)),
  image: (node, block) => link(node, ["Image: ", ...block.within(node)]),
  source: (node, block) => element("p", {}, element("span", { className: "source" }, ...block.text(node.text))),
};

function plain(tag) {
  return (node, block) => element(tag, {}, ...block.within(node));
}

function code(node, block) {
  block.text(node.mark + node.info); // the fence has an origin, too
  const language = node.info.trim().split(/\s/, 1)[0];
  const lines = element("code", {}, ...block.text(node.text));
  return element("div", { className: "code" },
    element("div", { className: "bar" }, element("span", {}, language || "code"),
      element("button", { type: "button", className: "copy" }, "Copy")),
    element("pre", { tabIndex: 0, role: "group", ariaLabel: language ? `Code, ${language}` : "Code" }, lines));
}

/** An image is a link, too: what an answer names is only fetched where the reader asks for it. */
function link(node, words) {
  const address = safeAddress(node.href);
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
