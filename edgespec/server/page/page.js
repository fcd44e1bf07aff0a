// The page: a conversation, its settings, and what each answer's drafts were worth. Text is only ever set as text.

import { ask, keepKey, servedModel } from "./stream.js";

const page = Object.fromEntries([...document.querySelectorAll("[id]")].map((each) => [each.id, each]));
const turns = []; // {question, answer, element}: an answer of "" is no part of the conversation
const asked = new Set();
let running = null; // the AbortController of the request under way
let model = null;
let following = true; // whether the reader is at the end, where the text grows

const UNAVAILABLE = "unavailable"; // not measured, which is not 0

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const say = (words) => { page.status.textContent = words; };
const fixed = (value, digits = 1) => (Number.isFinite(value) ? value.toFixed(digits) : UNAVAILABLE);
const counted = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;

// ---- one answer ----

class Answer {
  text = "";
  nTokens = 0;
  usage = null;
  finish = null;
  #words = ""; // what the server says while the request waits
  #began = performance.now();
  #first = null;
  #last = null;

  constructor(speculative, heading = null) {
    this.speculative = speculative;
    this.compared = heading !== null; // then a table below says the rest
    this.body = element("p", { className: "text" });
    this.figures = element("ul", { className: "figures" });
    this.element = element("section", { className: "answer" }, ...(heading ? [element("h3", {}, heading)] : []), this.body, this.figures);
  }

  /** Generate the answer to `body`, and show it as it comes. */
  async run(body, signal) {
    this.#began = performance.now();
    this.element.dataset.state = "running";
    const clock = setInterval(() => this.#showProgress(), 250);
    this.#showProgress();
    const off = this.speculative ? {} : { speculative: { drafter: "none" } };
    try {
      const on = { part: (...part) => this.#add(...part), waiting: (words) => { this.#words = words; } };
      Object.assign(this, await ask({ ...body, ...off }, signal, on));
    } catch (error) {
      this.finish = error.name === "AbortError" ? "stopped" : "failed";
      if (this.finish === "failed") throw error;
    } finally {
      clearInterval(clock);
      this.element.dataset.state = "done";
      this.#showFigures();
    }
  }

  #add(text, { origins = [], n_tokens: nTokens = NaN } = {}) {
    this.#last = performance.now();
    this.#first ??= this.#last;
    this.nTokens += nTokens; // a run of one origin may be several: the number is only known where it is told
    this.text += text;
    const characters = Array.from(text); // as the server counts them: a string's length counts some twice
    let start = 0;
    for (const [n, origin] of origins) this.#append(characters.slice(start, (start += n)).join(""), origin);
    this.#append(characters.slice(start).join(""), "target");
    follow();
  }

  #append(text, origin) {
    if (!text) return;
    const last = this.body.lastElementChild;
    if (last?.dataset.origin === origin) return last.append(text);
    const span = element("span", {}, text);
    span.dataset.origin = origin;
    this.body.append(span);
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
    if (this.#first === null) return this.#show([this.#words || "Reading the prompt", waited]);
    return this.#show(this.#progress());
  }

  #progress() {
    const perSecond = this.text.length / ((this.#last - this.#first) / 1000);
    return this.nTokens > 1
      ? [`${fixed(this.speed)} tokens/s`, counted(this.nTokens, "token")]
      : [Number.isFinite(perSecond) ? `${fixed(perSecond, 0)} characters/s` : "", counted(this.text.length, "character")];
  }

  #showFigures() {
    const ends = { stopped: "stopped", length: "cut off at the most tokens" };
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

// ---- two answers side by side ----

const ORDER =
  "One run each, with speculation first: so it can draft nothing from the other answer, and it is the one " +
  "that reads the new part of the prompt. Speeds count from the first token on.";

function comparison(on, off) {
  const ratio = on.speed / off.speed;
  const verdict = ratio >= 1.005
    ? `With speculation ${fixed(ratio, 2)} times as fast.`
    : `Speculation did not help here: ${fixed(ratio, 2)} times the speed without.`;
  const perToken = (answer) => {
    const joules = answer.joules / answer.usage?.completion_tokens;
    return Number.isFinite(joules) ? `${fixed(joules, 2)} J` : UNAVAILABLE;
  };
  const rows = [
    ["Tokens/s", (each) => fixed(each.speed)],
    ["Tokens", (each) => String(each.usage?.completion_tokens ?? each.nTokens)],
    ["Drafted tokens accepted", (each) => each.drafts],
    ["First token after", (each) => each.firstToken],
    ["Prompt tokens", (each) => each.prompt],
    ["Energy a token", perToken],
  ];
  const heads = ["", "With", "Without"].map((words) => element(words ? "th" : "td", words ? { scope: "col" } : {}, words));
  const notes = [
    Number.isFinite(ratio) ? verdict : "",
    on.text === off.text ? "Both texts are the same." : "The texts differ: compare their speeds with care.",
    ORDER,
    on.askedBefore ? "This was asked before: drafts may come from the earlier answer." : "",
  ];
  const table = element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {},
    ...rows.map(([name, of]) => element("tr", {}, element("th", { scope: "row" }, name),
      ...[on, off].map((each) => element("td", {}, of(each)))))));
  const [headline, ...others] = notes.filter(Boolean);
  return element("div", { className: "comparison" }, element("p", { className: "lead" }, headline), table,
    element("p", { className: "note" }, others.join(" ")));
}

// ---- the conversation ----

function settings() {
  for (const input of [page.temperature, page["max-tokens"]]) {
    if (input.checkValidity()) continue;
    showSettings(true);
    input.reportValidity();
    return null;
  }
  const number = (input) => (input.value === "" ? {} : { [input.name]: input.valueAsNumber });
  return { ...(model && { model }), ...number(page.temperature), ...number(page["max-tokens"]) };
}

function messages(question) {
  const system = page.system.value.trim();
  const earlier = turns.filter((turn) => turn.answer);
  return [
    ...(system ? [{ role: "system", content: system }] : []),
    ...earlier.flatMap((turn) => [{ role: "user", content: turn.question }, { role: "assistant", content: turn.answer }]),
    { role: "user", content: question },
  ];
}

/** Ask `question` once, or, where `ways` holds two, with speculation and without. */
async function converse(question, ways) {
  const parameters = settings();
  if (running || !parameters) return;
  const body = { ...parameters, messages: messages(question) };
  const both = ways.length > 1;
  const answers = ways.map((on) => new Answer(on, both ? `${on ? "With" : "Without"} speculation` : null));
  answers[0].askedBefore = asked.has(question);
  asked.add(question);
  const turn = { question, answer: "", ways, element: turnElement(question, answers, both) };
  turns.push(turn);
  page.empty.hidden = true;
  page.log.append(turn.element);
  setRunning(new AbortController());
  following = true;
  say("Generating.");
  try {
    for (const answer of answers) {
      follow();
      await answer.run(body, running.signal);
      turn.answer ||= answer.text;
      if (answer.finish === "stopped") break;
    }
    if (both && answers[1].usage) showComparison(turn, answers);
    say(answers.some((each) => each.finish === "stopped") ? "Stopped." : `Answer complete: ${figures(answers)}.`);
  } catch (error) {
    turn.element.append(element("p", { className: "failure", role: "alert" }, error.message));
    if (error.status === 401) askForKey();
  } finally {
    if (!turn.answer) turn.element.append(element("p", { className: "note" }, "Not part of the conversation."));
    setRunning(null);
    showRetry();
    follow();
  }
}

function showComparison(turn, answers) {
  const shown = comparison(...answers);
  turn.element.append(shown);
  if (following) shown.scrollIntoView();
  following = false; // its first line is what matters
}

const figures = (answers) => answers.map((each) => `${fixed(each.speed)} tokens a second`).join(" with speculation, against ");

function turnElement(question, answers, both) {
  const own = element("div", { className: "question" }, element("h2", {}, "You"), element("p", { className: "text" }, question));
  const columns = element("div", { className: both ? "columns" : "" }, ...answers.map((each) => each.element));
  return element("article", {}, own, element("h2", {}, "Answer"), columns);
}

/** Offer to ask the last question again, below it and nowhere else. */
function showRetry() {
  page.log.querySelectorAll(".retry").forEach((each) => each.remove());
  const last = turns.at(-1);
  if (running || !last) return;
  const button = element("button", { type: "button", className: "retry" }, "Retry");
  button.addEventListener("click", retry);
  last.element.append(button);
}

function retry() {
  const last = turns.at(-1);
  if (running || !last || !settings()) return;
  turns.pop();
  last.element.remove();
  page.message.focus({ preventScroll: true });
  converse(last.question, last.ways.length > 1 ? last.ways : [page.speculation.checked]);
}

function setRunning(controller) {
  running = controller;
  page.send.textContent = running ? "Stop" : "Send";
  page.compare.disabled = Boolean(running);
}

function submit(ways) {
  const question = page.message.value.trim();
  if (!question) return page.message.focus();
  if (running || !settings()) return;
  page.message.value = "";
  showSettings(false);
  converse(question, ways);
}

function startAnew() {
  running?.abort();
  turns.splice(0);
  page.log.replaceChildren();
  page.empty.hidden = false;
  page.message.focus();
  say("New chat.");
}

// ---- the key, the settings, the page ----

function askForKey() {
  page["key-form"].hidden = false;
  page.key.focus();
}

async function greet() {
  try {
    model = await servedModel();
    page.model.textContent = model ?? "";
  } catch (error) {
    page.model.textContent = error.status === 401 ? "" : error.message;
    if (error.status === 401) askForKey();
  }
}

function showSettings(open) {
  page["settings-button"].setAttribute("aria-expanded", String(open));
}

function follow() {
  if (following) window.scrollTo(0, document.documentElement.scrollHeight);
}

window.addEventListener("scroll", () => {
  following = window.innerHeight + window.scrollY >= document.documentElement.scrollHeight - 60;
}, { passive: true });

page.composer.addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) running.abort();
  else submit([page.speculation.checked]);
});

page.message.addEventListener("keydown", (event) => {
  const onPhone = window.matchMedia("(pointer: coarse)").matches; // there Enter starts a line
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || onPhone) return;
  event.preventDefault();
  if (!running) submit([page.speculation.checked]);
});

page.compare.addEventListener("click", () => submit([true, false]));
page.new.addEventListener("click", startAnew);
page.marks.addEventListener("change", () => { document.body.classList.toggle("unmarked", !page.marks.checked); });
page["settings-button"].addEventListener("click", (event) => {
  showSettings(event.currentTarget.getAttribute("aria-expanded") === "false");
});

page["key-form"].addEventListener("submit", async (event) => {
  event.preventDefault();
  keepKey(page.key.value);
  page.key.value = "";
  page["key-form"].hidden = true;
  page.message.focus();
  await greet();
  if (turns.length && !turns.at(-1).answer) retry();
});

greet();
