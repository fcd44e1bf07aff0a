// One answer: its text as it comes, and what its drafts were worth.

import { copyFrom, element } from "./dom.js";
import { GrowingText } from "./growing.js";
import { ask } from "./stream.js";

export const UNAVAILABLE = "unavailable"; // not measured, which is not 0
export const fixed = (value, digits = 1) => (Number.isFinite(value) ? value.toFixed(digits) : UNAVAILABLE);
const counted = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;

export class Answer {
  text = "";
  nTokens = 0;
  usage = null;
  finish = null;
  limit = null; // most tokens that were asked for
  #place = 0; // in the server's queue; 0: in none
  #read = null; // [n, all]: tokens of the prompt that are read
  #began = performance.now();
  #first = null;
  #last = null;
  #shown = new GrowingText();
  #thoughts = element("p");
  #thinking = element("details", { className: "thoughts", hidden: true }, element("summary", {}, "Thoughts"), this.#thoughts);
  #copy = element("button", { type: "button", className: "copy", hidden: true, title: "The answer as markdown" }, "Copy");

  constructor(speculative, heading = null) {
    this.speculative = speculative;
    this.compared = heading !== null; // then a table below says the rest
    this.figures = element("ul", { className: "figures" });
    this.#copy.addEventListener("click", () => copyFrom(this.#copy, this.text));
    this.element = element("section", { className: "answer" }, ...(heading ? [element("h3", {}, heading)] : []),
      this.#thinking, this.#shown.element, element("div", { className: "below" }, this.figures, this.#copy));
  }

  /** Show an answer that was kept, as `toJSON` gave it. */
  async restore({ text, runs, thoughts, nTokens, usage, finish, limit, times }) {
    Object.assign(this, { text, nTokens, usage, finish, limit });
    [this.#began, this.#first, this.#last] = [0, ...times];
    if (thoughts) this.#showThought(thoughts);
    await this.#shown.restore(text, runs);
    this.#end();
  }

  /** Return all that `restore` needs; an answer under way counts as stopped. */
  toJSON() {
    const { text, nTokens, usage, limit } = this;
    const times = [this.#first, this.#last].map((time) => (time === null ? null : time - this.#began));
    const [runs, thoughts] = [this.#shown.runs, this.#thoughts.textContent];
    return { text, runs, thoughts, nTokens, usage, finish: this.finish ?? "stopped", limit, times };
  }

  /** Generate the answer to `body`, and show it as it comes; again, where the server goes on with it. */
  async run(body, signal) {
    this.#began = performance.now();
    this.element.dataset.state = "running";
    [this.nTokens, this.#first, this.#read, this.usage, this.finish] = [0, null, null, null, null];
    this.limit = body.max_tokens ?? null;
    const clock = setInterval(() => this.#showProgress(), 250);
    this.#showProgress();
    const off = this.speculative ? {} : { speculative: { drafter: "none" } };
    try {
      const on = {
        part: (...part) => this.#add(...part),
        thought: (text) => this.#think(text),
        waiting: (place) => { this.#place = place; },
        reading: (...read) => { this.#read = read; },
      };
      Object.assign(this, await ask({ ...body, ...off }, signal, on));
    } catch (error) {
      this.finish = error.name === "AbortError" ? "stopped" : "failed";
      if (this.finish === "failed") throw error;
    } finally {
      clearInterval(clock);
      await this.#shown.finish();
      this.#end();
    }
  }

  #end() {
    this.#copy.hidden = !this.text;
    this.element.dataset.state = "done";
    this.#showFigures();
  }

  #add(text, { origins = [], n_tokens: nTokens = NaN } = {}) {
    this.#last = performance.now();
    this.#first ??= this.#last;
    this.nTokens += nTokens; // a run of one origin may be several: the number is only known where it is told
    this.text += text;
    const characters = Array.from(text); // as the server counts them: a string's length counts some twice
    let start = 0;
    for (const [n, origin] of origins) this.#shown.append(characters.slice(start, (start += n)).join(""), origin);
    this.#shown.append(characters.slice(start).join(""), "target");
  }

  #think(text) {
    this.#last = performance.now();
    this.#first ??= this.#last;
    this.#showThought(text);
  }

  #showThought(text) {
    this.#thinking.hidden = false;
    this.#thoughts.append(text); // as text: nothing in it is markup
  }

  /** Whether the most tokens that were asked for ended it, and not a full context. */
  get isCut() {
    return this.finish === "length" && this.limit !== null && !(this.usage?.completion_tokens < this.limit);
  }

  /** Tokens a second after the first one: the server's figure, else what this page saw. */
  get speed() {
    return this.usage?.edgespec?.tokens_per_second ?? (this.nTokens - 1) / ((this.#last - this.#first) / 1000);
  }

  get joules() {
    return this.usage?.edgespec?.joules ?? NaN;
  }

  get drafts() {
    const { drafted, accepted } = this.usage?.edgespec ?? {};
    if (drafted === undefined) return UNAVAILABLE;
    return drafted ? `${accepted} of ${drafted} (${Math.round((100 * accepted) / drafted)}\u00a0%)` : "none drafted";
  }

  get prompt() {
    const [n, cached] = [this.usage?.prompt_tokens, this.usage?.edgespec?.cached_tokens];
    return n === undefined ? UNAVAILABLE : `${n} (cached: ${cached ?? UNAVAILABLE})`;
  }

  get firstToken() {
    return this.#first === null ? UNAVAILABLE : `${fixed((this.#first - this.#began) / 1000, 2)} s`;
  }

  #showProgress() {
    const waited = `${fixed((performance.now() - this.#began) / 1000, 0)} s`;
    if (this.#first === null && this.#place) return this.#show([`Waiting, ${this.#place - 1} before you`, waited]);
    if (this.#first === null && !this.#read) return this.#show(["Reading the prompt", waited]);
    if (this.#first === null) {
      const [value, max] = this.#read;
      const bar = element("progress", { value, max, ariaLabel: "Prompt read" });
      return this.#show([bar, `Reading the prompt: ${Math.floor((100 * value) / max)}\u00a0% of ${max} tokens`, waited]);
    }
    return this.#show(this.#progress());
  }

  #progress() {
    const perSecond = this.text.length / ((this.#last - this.#first) / 1000);
    return this.nTokens > 1
      ? [`${fixed(this.speed)} tokens/s`, counted(this.nTokens, "token")]
      : [Number.isFinite(perSecond) ? `${fixed(perSecond, 0)} characters/s` : "", counted(this.text.length, "character")];
  }

  #showFigures() {
    const length = this.isCut
      ? `cut off at ${counted(this.limit, "token")}, the most that Settings allow`
      : "cut off: the context is full; begin a new chat, or serve with a larger --ctx";
    const ends = { stopped: "stopped", length };
    const n = this.usage?.completion_tokens;
    const told = this.usage && !this.compared;
    const speed = Number.isFinite(this.speed) ? `${fixed(this.speed)} tokens/s` : "";
    this.#show([
      ...(this.usage ? [speed, counted(n, "token")] : this.text ? this.#progress() : []),
      ends[this.finish] ?? "",
      this.speculative || this.compared ? "" : "speculation off",
      told && this.speculative ? `drafts accepted: ${this.drafts}` : "",
      ...(told
        ? [
            `prompt: ${this.prompt}`,
            `first token after ${this.firstToken}`,
            `energy: ${Number.isFinite(this.joules) ? `${fixed(this.joules)} J` : UNAVAILABLE}`,
          ]
        : []),
    ]);
  }

  #show(figures) {
    this.figures.replaceChildren(...figures.filter(Boolean).map((words) => element("li", {}, words)));
  }
}
