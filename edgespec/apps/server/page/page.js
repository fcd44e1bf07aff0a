// The page: a conversation, its settings, and the questions that are asked of the server.

import { Answer, fixed } from "./answer.js";
import { comparison } from "./comparison.js";
import { element } from "./dom.js";
import { dataUrl, imagesIn, thumbnails } from "./images.js";
import { keep, kept } from "./kept.js";
import { Recording } from "./speech.js";
import { hasKey, keepKey, servedModels, transcribe } from "./stream.js";

const page = Object.fromEntries([...document.querySelectorAll("[id]")].map((each) => [each.id, each]));
const turns = []; // {question, images, ways, answers, failure, element, notes}: one without text is no part of the conversation
const asked = new Set();
let running = null; // the AbortController of the request under way
let model = null;
let images = []; // data: URLs, for the next message
let following = false; // whether the reader is at the end, where the text grows

const say = (words) => { page.status.textContent = words; };

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

const asUser = (question, images) => ({
  role: "user",
  content: images.length ? [...images.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text: question }] : question,
});

function messages(question, images = []) {
  const system = page.system.value.trim();
  const earlier = turns.filter(said);
  return [
    ...(system ? [{ role: "system", content: system }] : []),
    ...earlier.flatMap((turn) => [asUser(turn.question, turn.images), { role: "assistant", content: said(turn) }]),
    ...(question === null ? [] : [asUser(question, images)]),
  ];
}

const said = (turn) => turn.answers.find((each) => each.text)?.text ?? "";

/** Ask `question` about `images` once, or, where `ways` holds two, with speculation and without. */
async function converse(question, images, ways) {
  const parameters = settings();
  if (running || !parameters) return;
  const body = { ...parameters, messages: messages(question, images) };
  const turn = newTurn({ question, images, ways });
  turn.answers[0].askedBefore = asked.has(question);
  asked.add(question);
  await generate(turn, body);
}

/** Have the model write on where the most tokens cut off its last answer. */
async function goOn() {
  const parameters = settings();
  if (running || !parameters) return;
  await generate(turns.at(-1), { ...parameters, messages: messages(null), continue_final_message: true });
}

async function generate(turn, body) {
  const { answers } = turn;
  turn.notes.replaceChildren();
  turn.failure = null;
  setRunning(new AbortController());
  showActions();
  following = true;
  say("Generating.");
  try {
    for (const answer of answers) {
      await answer.run(body, running.signal);
      if (answer.finish === "stopped") break;
    }
    say(answers.some((each) => each.finish === "stopped") ? "Stopped." : `Answer complete: ${figures(answers)}.`);
  } catch (error) {
    turn.failure = error.message;
    if (error.status === 401) askForKey(error);
  }
  showNotes(turn);
  setRunning(null);
  showActions();
  keepAll();
  const isElsewhere = page.settings.contains(document.activeElement) || !window.getSelection().isCollapsed;
  if (page["key-form"].hidden && !isElsewhere) page.message.focus({ preventScroll: true });
}

/** Show below a turn what is to be said of it. */
function showNotes(turn) {
  const { answers, failure, notes } = turn;
  if (answers[1]?.usage) showComparison(turn, answers);
  if (failure) notes.append(element("p", { className: "failure", role: "alert" }, failure));
  if (!said(turn)) notes.append(element("p", { className: "note" }, "Not part of the conversation."));
}

function showComparison(turn, answers) {
  const shown = comparison(...answers);
  turn.notes.append(shown);
  if (following) shown.scrollIntoView();
  following = false; // its first line is what matters
}

const figures = (answers) => answers.map((each) => `${fixed(each.speed)} tokens a second`).join(" with speculation, against ");

/** Add a turn to the conversation and to the page. */
function newTurn({ question, images = [], ways, failure = null }) {
  const both = ways.length > 1;
  const answers = ways.map((on) => new Answer(on, both ? `${on ? "With" : "Without"} speculation` : null));
  const own = element("div", { className: "question" }, element("h2", {}, "You"), thumbnails(images), element("p", { className: "text" }, question));
  const columns = element("div", { className: both ? "columns" : "" }, ...answers.map((each) => each.element));
  const notes = element("div");
  const turn = { question, images, ways, answers, failure, notes, element: element("article", {}, own, element("h2", {}, "Answer"), columns, notes) };
  turns.push(turn);
  page.empty.hidden = true;
  page.log.append(turn.element);
  return turn;
}

/** Offer below the last answer, once it has ended, to ask again, and to go on where it was cut off. */
function showActions() {
  page.log.querySelectorAll(".actions").forEach((each) => each.remove());
  const last = turns.at(-1);
  if (running || !last) return;
  const action = (name, does) => {
    const button = element("button", { type: "button" }, name);
    button.addEventListener("click", does);
    return button;
  };
  const cut = last.answers.length === 1 && last.answers[0].isCut && said(last);
  last.element.append(element("div", { className: "actions" },
    ...(cut ? [action("Go on", goOn)] : []), action("Retry", retry)));
}

function retry() {
  const last = turns.at(-1);
  if (running || !last || !settings()) return;
  turns.pop();
  last.element.remove();
  page.message.focus({ preventScroll: true });
  converse(last.question, last.images, last.ways.length > 1 ? last.ways : [page.speculation.checked]);
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
  const sent = images;
  showImages([]);
  showSettings(false);
  converse(question, sent, ways);
}

function startAnew() {
  running?.abort();
  turns.splice(0);
  keepAll();
  page.log.replaceChildren();
  page.empty.hidden = false;
  page.message.focus();
  say("New chat.");
}

// ---- images ----

function showImages(urls) {
  images = urls;
  page.images.replaceChildren(...(urls.length ? [thumbnails(urls, (i) => {
    showImages(urls.filter((_, at) => at !== i));
    page.message.focus();
  })] : []));
}

async function attach(files) {
  page["image-failure"].hidden = true;
  for (const file of files) {
    try {
      showImages([...images, await dataUrl(file)]);
      say("Image added to the message.");
    } catch (error) {
      page["image-failure"].textContent = error.message;
      page["image-failure"].hidden = false;
    }
  }
}

/** Take the images of a transfer that `event` brings, if the model reads images. */
function take(event, transfer) {
  const files = page.attach.hidden ? [] : imagesIn(transfer);
  if (!files.length) return;
  event.preventDefault();
  attach(files);
}

// ---- speech ----

let recording = null; // what is being recorded
let hearing = null; // the AbortController of what is being written down

/** Begin to record; or end that, and have it written into the message; or stop the writing. */
async function speak() {
  if (hearing) return hearing.abort();
  try {
    if (!recording) {
      recording = await Recording.begin();
      showSpeech("Recording.");
      return;
    }
    const ended = recording;
    recording = null;
    hearing = new AbortController();
    showSpeech("Writing down what was said.");
    await transcribe(await ended.end(), hearing.signal, write);
    say("Written into the message.");
  } catch (error) {
    recording = null;
    if (error.name === "AbortError") say("Stopped.");
    else complain(error);
  }
  hearing = null;
  showSpeech();
  page.message.focus();
}

function showSpeech(words) {
  page.speak.textContent = recording ? "Done" : hearing ? "Stop writing" : "Speak";
  page.speak.setAttribute("aria-pressed", String(Boolean(recording)));
  if (words) {
    say(words);
    page["speech-failure"].hidden = true;
  }
}

/** Add what was said to the message. */
function write(text) {
  const before = page.message.value;
  page.message.value = before && !/\s$/.test(before) ? before + text : before + text.trimStart();
}

function complain(error) {
  page["speech-failure"].textContent = error.message;
  page["speech-failure"].hidden = false;
  if (error.status === 401) askForKey(error);
}

// ---- what a reload must not lose ----

const CONVERSATION = "edgespec-conversation";
const SETTINGS = "edgespec-settings";
const INPUTS = ["system", "temperature", "max-tokens", "marks", "speculation", "message"].map((name) => page[name]);

function keepAll() {
  keep(SETTINGS, INPUTS.map((each) => (each.type === "checkbox" ? each.checked : each.value)));
  const conversation = turns.map(({ question, images, ways, answers, failure }) => ({ question, images, ways, answers, failure }));
  page["not-kept"].hidden = keep(CONVERSATION, turns.length ? conversation : null);
}

async function restoreAll() {
  for (const [i, value] of (kept(SETTINGS) ?? []).entries()) {
    if (typeof value === "boolean") INPUTS[i].checked = value;
    else INPUTS[i].value = value;
  }
  showMarks();
  const earlier = (kept(CONVERSATION) ?? []).map((each) => [newTurn(each), each.answers]);
  await Promise.all(earlier.map(async ([turn, answers]) => {
    asked.add(turn.question);
    await Promise.all(turn.answers.map((answer, i) => answer.restore(answers[i])));
    showNotes(turn);
  }));
  showActions();
  window.scrollTo(0, document.documentElement.scrollHeight);
}

function showMarks() {
  document.body.classList.toggle("unmarked", !page.marks.checked);
}

window.addEventListener("pagehide", keepAll);

// ---- the key, the settings, the page ----

/** Ask for the API key; where one was sent, say what is wrong with it. */
function askForKey(error) {
  page["key-form"].hidden = false;
  page["key-failure"].textContent = error.message;
  page["key-failure"].hidden = !hasKey();
  page.key.focus();
}

async function greet() {
  try {
    const served = await servedModels();
    model = served.model;
    page.model.textContent = [served.model, served.speech].filter(Boolean).join(", ");
    page.speak.hidden = !served.speech;
    page.attach.hidden = !served.vision;
    page.send.hidden = page.compare.hidden = !served.model; // a server of speech alone
  } catch (error) {
    page.model.textContent = error.status === 401 ? "" : error.message;
    if (error.status === 401) askForKey(error);
  }
}

function showSettings(open) {
  page["settings-button"].setAttribute("aria-expanded", String(open));
}

new ResizeObserver(() => {
  if (following) window.scrollTo(0, document.documentElement.scrollHeight);
}).observe(page.log);

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

page.attach.addEventListener("click", () => page.files.click());
page.files.addEventListener("change", () => attach([...page.files.files]).then(() => { page.files.value = ""; }));
page.message.addEventListener("paste", (event) => take(event, event.clipboardData));
document.addEventListener("dragover", (event) => {
  if (!page.attach.hidden && event.dataTransfer.types.includes("Files")) event.preventDefault(); // so that it may be dropped
});
document.addEventListener("drop", (event) => take(event, event.dataTransfer));
page.speak.addEventListener("click", speak);
page.compare.addEventListener("click", () => submit([true, false]));
page.new.addEventListener("click", startAnew);
page.marks.addEventListener("change", showMarks);
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
  if (turns.length && !said(turns.at(-1))) retry();
});

page.message.focus();
greet();
restoreAll().catch(startAnew); // what another version kept
