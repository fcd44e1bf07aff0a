// Two answers to one question, with speculation and without: their figures side by side.

import { fixed, UNAVAILABLE } from "./answer.js";
import { element } from "./dom.js";

const ORDER =
  "One run each, with speculation first: so it can draft nothing from the other answer, and it is the one " +
  "that reads the new part of the prompt. Speeds count from the first token on.";

/** Return the table of both. */
export function comparison(on, off) {
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
