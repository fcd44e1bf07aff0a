// Talks to the server: requests, errors in plain words, and the events of a streamed answer.

const KEY = "edgespec-api-key";

/** What went wrong, in words for the reader. `status` is HTTP's, 0 where there was no answer. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Keep the API key until the tab is closed. */
export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

/**
 * Return {model, speech, vision}: the names of the models that are served for texts and for speech, each null for none,
 * and whether the former reads images.
 */
export async function servedModels() {
  const models = (await (await request("v1/models")).json()).data ?? [];
  const first = (isSpeech) => models.find((each) => Boolean(each.edgespec?.speech) === isSpeech);
  const text = first(false);
  return { model: text?.id ?? null, speech: first(true)?.id ?? null, vision: Boolean(text?.edgespec?.vision) };
}

/** Have a recording written down, and call `onText` for each piece of text. */
export async function transcribe(file, signal, onText) {
  const body = new FormData();
  body.append("file", file, "speech.wav");
  body.append("stream", "true");
  const response = await request("v1/audio/transcriptions", { method: "POST", body, signal });
  let done = false;
  for await (const { data } of events(response.body)) {
    if (!data) continue;
    const event = JSON.parse(data);
    if (event.error) throw new ServerError(event.error.message);
    if (event.type === "transcript.text.delta") onText(event.delta);
    done ||= event.type === "transcript.text.done";
  }
  if (!done) throw new ServerError("The connection ended before all was written down.");
}

/** Return {blocks, ms}: the blocks of a text in markdown, and what reading it took. With `open` more is to come. */
export async function markdownBlocks(source, open) {
  return (await request(`page/markdown${open ? "?open" : ""}`, { method: "POST", body: source })).json();
}

/**
 * Ask for a chat completion, and call `on.part(text, edgespec)` for each piece of text, `on.thought(text)` for each
 * piece of the model's thoughts, `on.waiting(place)` for each place in the queue, 1 for the next one and 0 once it begins, and
 * `on.reading(n, all)` with the tokens of the prompt that are read. Return its finish reason and usage, each null where the server sent none.
 */
export async function ask(body, signal, on) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  const outcome = { finish: null, usage: null };
  let done = false;
  for await (const { comment, data } of events(response.body)) {
    const place = /^queue (\d+)$/.exec(comment)?.[1];
    if (place) on.waiting(Number(place));
    const read = /^reading (\d+) of (\d+) tokens$/.exec(comment);
    if (read) on.reading(Number(read[1]), Number(read[2]));
    if (data === "[DONE]") done = true; // and read on to the end, which keeps the connection
    if (!data || done) continue;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message);
    const choice = chunk.choices?.[0];
    if (choice?.delta?.reasoning_content) on.thought(choice.delta.reasoning_content);
    if (choice?.delta?.content) on.part(choice.delta.content, chunk.edgespec);
    outcome.finish = choice?.finish_reason ?? outcome.finish;
    outcome.usage = chunk.usage ?? outcome.usage;
  }
  if (!done) throw new ServerError("The connection ended before the answer was complete.");
  return outcome;
}

/** Yield the events of a text/event-stream: {data} or {comment}. A chunk may end anywhere, within a character too. */
export async function* events(body) {
  let rest = "";
  let data = [];
  for await (const text of texts(body)) {
    const lines = (rest + text).split("\n");
    rest = lines.pop();
    for (const line of lines.map((each) => each.replace(/\r$/, ""))) {
      if (line === "") {
        if (data.length) yield { data: data.join("\n") };
        data = [];
      } else if (line.startsWith(":")) yield { comment: line.slice(1).trim() };
      else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
    }
  }
}

async function* texts(body) {
  const reader = body.getReader(); // not `for await (... of body)`, which Safari lacks
  const decoder = new TextDecoder();
  try {
    for (;;) {
      const piece = await reader.read().catch((error) => { throw unreachable(error); });
      if (piece.done) return;
      yield decoder.decode(piece.value, { stream: true });
    }
  } finally {
    reader.cancel().catch(() => {}); // where the caller gave up; the server then ends the generation
  }
}

async function request(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    throw unreachable(error);
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  throw new ServerError(answer?.error?.message ?? `The server answered with status ${response.status}.`, response.status);
}

function unreachable(error) {
  if (error.name === "AbortError") return error;
  return new ServerError("The server cannot be reached, or ended the connection. Is edgespec serve still running?");
}
