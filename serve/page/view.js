// Elements of the page, and the parts that show what is served. All texts are set as text, never as HTML.

import { marked } from "./marks.js";
import { hashOf } from "./state.js";

export const NAMES = { __proto__: null, dense: "Dense", exact: "Exact", bm25: "BM25", hybrid: "Hybrid" };
const KEYS = [
  ["/", "to the query"],
  ["↑ ↓", "to the next hit"],
  ["← →", "to the next column"],
  ["Enter", "shows the whole text"],
  ["Esc", "back to the query"],
];

export const one = (id) => document.getElementById(id);

/** Returns an element with children, and with a class (a text) or properties. */
export function made(name, own, ...children) {
  const element = document.createElement(name);
  if (typeof own === "string") element.classList.add(...own.split(" ").filter(Boolean));
  else Object.assign(element, own);
  element.append(...children.filter((child) => child !== undefined && child !== null));
  return element;
}

export const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

/** Returns the content of the start page. */
export function startOf(info, tasks) {
  const shown = [
    [info.is_split ? "Passages of documents" : "Passages", info.passages.toLocaleString("en")],
    ["Encoder", info.encoder ? `${info.encoder}, ${plural(info.dim ?? 0, "dimension")}` : "none"],
    ...(info.query_model ? [["Encoder of queries", info.query_model]] : []),
    ["Re-ranker", info.reranker ?? "none"],
    ["Release", info.release],
  ];
  const list = made("dl", "served", ...shown.flatMap(([name, value]) => [made("dt", "", name), made("dd", "", value)]));
  for (const task of tasks.slice(0, 20)) {
    const modes = task.modes.map((mode) => NAMES[mode] ?? mode).join(", ");
    list.append(made("dt", "", `Task ${task.name}`), made("dd", "", modes || task.sources.join(", ")));
  }
  const certified = (info.certified ?? []).map((group) => {
    const names = `${group.task}, ${NAMES[group.mode] ?? group.mode}, ${group.k} hits, filter ${group.filter}`;
    const ends = `${group.lower.toFixed(3)} to ${group.upper.toFixed(3)}`;
    const state = group.is_below_target ? ", below the target" : "";
    const size = group.samples.toLocaleString("en");
    return [made("dt", "", names), made("dd", "", `${group.recall.toFixed(3)} (${ends}) in ${size} searches${state}`)];
  });
  const raised = (info.raised_settings ?? []).map((each) => {
    const names = `${each.task}, ${NAMES[each.mode] ?? each.mode}, ${each.source}`;
    return [made("dt", "", names), made("dd", "", `${each.setting} ${each.value}, raised from ${each.built}`)];
  });
  const examples = info.examples.map((q) => made("li", "", made("a", { href: hashOf({ q }) }, q)));
  return [
    examples.length ? made("section", "", made("h2", "", "Try"), made("ul", "examples", ...examples)) : null,
    made("section", "", made("h2", "", "Served here"), list),
    certified.length || raised.length
      ? made(
          "section",
          "",
          made("h2", "", "Recall of the index"),
          made("dl", "served", ...certified.flat(), ...raised.flat()),
        )
      : null,
    made(
      "section",
      "",
      made("h2", "", "Keys"),
      made(
        "dl",
        "served",
        ...KEYS.flatMap(([key, use]) => [made("dt", "", made("kbd", "", key)), made("dd", "", use)]),
      ),
    ),
  ].filter(Boolean);
}

/** Returns the rows of the table of tasks. */
export function taskRows(tasks) {
  return tasks.map((task) => {
    const sides = Object.entries(task.length)
      .map(([side, length]) => `${length} (${side})`)
      .join(", ");
    const index = task.index || (task.embeddings ? `${task.embeddings} (every vector)` : "none");
    const cells = [
      task.name,
      task.prompt ? task.prompt.slice(0, 12) : "none",
      sides,
      index,
      task.bm25 || "none",
      task.sources.join(", "),
    ];
    return made("tr", "", ...cells.map((text) => made("td", "", text)));
  });
}

/** Returns a bad filter with its first wrong character, or the field that a message names, marked. */
export function wrongPlace(filter, message) {
  const characters = [...filter]; // the server counts code points
  const [, position] = message.match(/^filter: at character (\d+):/) ?? [];
  const [, quoted, plain] = message.match(/^filter: (?:'(.+?)' is|([^\s:]+):)/) ?? [];
  const start = position ? Number(position) - 1 : quoted || plain ? filter.indexOf(quoted ?? plain) : -1;
  if (start < 0) return null;
  if (!position) return made("code", "", ...marked(filter, [[start, start + (quoted ?? plain).length]]));
  const before = characters.slice(0, start).join("");
  const [word] = filter.slice(before.length).match(/^[\p{L}\p{N}_.-]+|^./su) ?? [""];
  return made(
    "code",
    "",
    ...marked(word ? filter : `${filter}\u00a0`, [[before.length, before.length + (word.length || 1)]]),
  );
}
