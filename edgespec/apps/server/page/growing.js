// An answer's text on the page while it grows: drawn at most once a frame, and no more of it than may still change.

import { copyFrom, element, patch } from "./dom.js";
import { blocks, unread } from "./markdown.js";

const LOST = 100; // ms: what a draw counts as while the server does not answer
const REST = 9; // times what drawing took, until the next: where the model has this processor, it needs it

export class GrowingText {
  element = element("div", { className: "text" });
  #source = "";
  #runs = []; // {end, origin}: what every character came from
  #drawing = false;
  #ended = false;
  #settled = { end: 0, nBlocks: 0 }; // of these blocks nothing changes any more

  constructor() {
    this.element.addEventListener("click", copyCode);
  }

  /** The [length, origin] of all of the text, for `restore`. */
  get runs() {
    return [...this.#between(0, this.#source.length)];
  }

  /** Show `text`, of which `runs` says what it came from. */
  async restore(text, runs) {
    this.#source = asRead(text);
    let end = 0;
    this.#runs = runs.map(([length, origin]) => ({ end: (end += length), origin }));
    await this.finish();
  }

  /** Add `text`, which came from `origin`; also after `finish`. */
  append(text, origin) {
    if (!text) return;
    this.#ended = false;
    this.#source += asRead(text);
    if (this.#runs.at(-1)?.origin === origin) this.#runs.at(-1).end = this.#source.length;
    else this.#runs.push({ end: this.#source.length, origin });
    if (!this.#drawing) this.#drawWhileGrowing();
  }

  /** Draw the whole text: a name at its end may be what a link before it goes to. */
  async finish() {
    this.#ended = true;
    const read = await blocks(this.#source, (...range) => this.#between(...range));
    if (read) return patch(this.element, read.made.map((each) => each.element));
    const { end, nBlocks } = this.#settled;
    patch(this.element, [unread(this.#source.slice(end), (from, to) => this.#between(end + from, end + to))], nBlocks);
  }

  async #drawWhileGrowing() {
    this.#drawing = true;
    for (let drawn = 0; drawn < this.#source.length && !this.#ended;) {
      await new Promise(requestAnimationFrame);
      drawn = this.#source.length;
      const ms = await this.#draw();
      await new Promise((resume) => { setTimeout(resume, REST * ms); });
    }
    this.#drawing = false;
  }

  /** Draw what may still change; return the milliseconds that it took here and on the server. */
  async #draw() {
    const { end, nBlocks } = this.#settled;
    const read = await blocks(this.#source.slice(end), (from, to) => this.#between(end + from, end + to), true);
    if (this.#ended || !read) return LOST;
    const { made, ms } = read;
    const began = performance.now();
    patch(this.element, made.map((each) => each.element), nBlocks);
    // The line under way may yet belong to the block before it: two blocks are open.
    if (made.length > 2) this.#settled = { end: end + made.at(-3).end, nBlocks: nBlocks + made.length - 2 };
    return ms + performance.now() - began;
  }

  /** Yield the [length, origin] of what is between two places of the text. */
  *#between(start, end) {
    let [low, high] = [0, this.#runs.length];
    while (low < high) { // the first run that ends behind the start
      const middle = (low + high) >> 1;
      if (this.#runs[middle].end > start) high = middle;
      else low = middle + 1;
    }
    for (; start < end && low < this.#runs.length; low++) {
      const run = this.#runs[low];
      const upTo = Math.min(end, run.end);
      yield [upTo - start, run.origin];
      start = upTo;
    }
  }
}

const asRead = (text) => text.replaceAll("\r", "").replaceAll("\0", "\ufffd");

function copyCode(event) {
  const button = event.target.closest("button.copy");
  if (button) copyFrom(button, button.closest(".code").querySelector("pre").textContent);
}
