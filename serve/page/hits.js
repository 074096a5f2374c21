// The columns of hits that answer a search.

import { excerptStart, marked, spansOf } from "./marks.js";
import { hashOf, savedRequestOf } from "./state.js";
import { NAMES, made, plural } from "./view.js";

const SHOWN_TERMS = 10; // terms of an explanation
const SAVE = "Save request for riptide replay";
const INLINE = 44; // characters of metadata that are not collapsed, about a line of a narrow column

/** Returns what a column searches, in words. */
export function titleOf(choice, isOneTask) {
  const source = choice.source ?? NAMES[choice.mode] ?? choice.mode;
  return isOneTask ? source : `${choice.task} · ${source}`;
}

/** Returns the columns of the answers to a search, each with its request; an answer may be an error instead. */
export function columnsOf(answers, state, words, isOneTask) {
  const keyOf = (hit) => (state.by === "document" && hit.document ? hit.document : hit.id);
  const titles = state.columns.map((choice) => titleOf(choice, isOneTask));
  const ranks = answers.map((answer) => new Map((answer.results?.[0].hits ?? []).map((hit) => [keyOf(hit), hit.rank])));
  return answers.map((answer, place) => {
    const heading = made("h2", "", titles[place]);
    const section = made("section", "", heading);
    section.setAttribute("aria-label", titles[place]);
    if (answer instanceof Error) {
      section.append(made("p", "wrong", answer.message));
      return section;
    }
    const [{ hits }] = answer.results;
    const items = hits.map((hit) => {
      const item = hitItem(hit, words);
      item.dataset.key = keyOf(hit);
      const others = ranks.filter((_, other) => other !== place && !(answers[other] instanceof Error));
      if (others.some((known) => known.has(item.dataset.key))) item.classList.add("shared");
      if (others.length && !(answers[0] instanceof Error)) {
        item.firstChild.append(changeOf(hit.rank, item.dataset.key, ranks, titles, place));
      }
      return item;
    });
    const list = hits.length ? made("ol", "", ...items) : emptyText(state, state.columns[place]);
    section.append(factsOf(answer), list);
    return section;
  });
}

// Returns the time of an answer, which opens to that of its stages and to a link that saves the request, and a warning
// if not all shards answered.
function factsOf(answer) {
  const { shards, hits } = answer.results[0];
  const stages = Object.entries(answer.took_ms).filter(([stage]) => stage !== "total");
  const sum = stages.reduce((total, [, ms]) => total + ms, 0) || 1;
  const bars = made(
    "div",
    { className: "stages", ariaHidden: "true" },
    ...stages.map(([, ms]) => {
      const bar = made("i");
      bar.style.width = `${(100 * ms) / sum}%`;
      return bar;
    }),
  );
  const lost = shards.total - shards.successful;
  return made(
    "div",
    "facts",
    made(
      "details",
      {},
      made("summary", "", `${plural(hits.length, "hit")} in ${answer.took_ms.total.toFixed(1)} ms`),
      bars,
      made("p", "", stages.map(([stage, ms]) => `${stage} ${ms.toFixed(1)} ms`).join(" · ")),
      made("p", "", `${answer.source} · ${shards.successful} of ${plural(shards.total, "shard")}`),
      lost ? null : made("p", "", made("a", { download: "request.jsonl", href: savedRequestOf(answer) }, SAVE)),
    ),
    lost
      ? made("p", "wrong", `${lost} of ${plural(shards.total, "shard")} did not answer: hits may be missing.`)
      : null,
  );
}

// Returns how the rank of a passage differs from that in the first column.
function changeOf(rank, key, ranks, titles, place) {
  const first = ranks[0].get(key);
  if (place === 0) {
    const alone = !ranks.slice(1).some((known) => known.has(key));
    return made("span", "change", alone ? "only here" : "");
  }
  if (first === undefined)
    return made("span", { className: "change new", title: `Not among the hits of ${titles[0]}` }, "new");
  const [sign, kind] = first > rank ? ["▲", "up"] : first < rank ? ["▼", "down"] : ["=", "equal"];
  const change = made(
    "button",
    { type: "button", className: `change ${kind}` },
    sign + (first === rank ? "" : ` ${Math.abs(first - rank)}`),
  );
  change.title = `Rank ${first} of ${titles[0]}`;
  change.setAttribute("aria-label", `Rank ${first} of ${titles[0]}: go there`);
  return change;
}

function hitItem(hit, words) {
  const mark = (text) => marked(text, spansOf(text, words));
  const title = hit.title || hit.document || hit.id;
  const heading = made("h3", "", made("span", "rank", `${hit.rank}`), made("span", "title", ...mark(title)));
  const text = textOf(hit.text, spansOf(hit.text, words));
  const more = made(
    "button",
    { type: "button", className: "plain more", hidden: true, ariaExpanded: "false" },
    "Whole text",
  );
  const item = made(
    "li",
    { tabIndex: 0 },
    heading,
    text,
    metadataOf(hit.metadata),
    explanationOf(hit),
    made("div", "foot", originOf(hit), more),
  );
  item.setAttribute("aria-label", `${hit.rank}. ${title}`);
  return item;
}

// Returns a text that begins with the words of the query, while it is cut.
function textOf(text, spans) {
  const start = excerptStart(text, spans);
  const before = marked(
    text.slice(0, start),
    spans.filter(([, end]) => end <= start),
  );
  const after = marked(
    text.slice(start),
    spans.filter(([from]) => from >= start).map(([from, end]) => [from - start, end - start]),
  );
  if (!start) return made("p", "text", ...after);
  return made("p", "text", made("span", "before", ...before), made("span", "gap", "… "), ...after);
}

// Returns where a hit comes from: its id, or its document and the number of its passage, and its scores.
function originOf(hit) {
  const number =
    hit.document && hit.id.startsWith(`${hit.document}#`) ? hit.id.slice(hit.document.length + 1) : undefined;
  const place =
    hit.start === undefined || hit.start === null
      ? ""
      : `, characters ${hit.start.toLocaleString("en")}–${hit.end.toLocaleString("en")}`;
  const id = made(
    "span",
    { className: "id", title: hit.id },
    number === undefined ? hit.id : `${hit.document}, passage ${number}${place}`,
  );
  const scores = Object.entries(hit.scores).filter(([, score], _, all) => all.length > 1 || score !== hit.score);
  const parts = scores.map(([source, score]) => `${source} ${score.toFixed(4)}`).join(" · ");
  return made("p", "from", id, ` · score ${hit.score.toFixed(4)}`, parts ? ` from ${parts}` : "");
}

// Returns why a passage is a hit: the sources with their largest terms, the fusion, the re-ranker and the filter.
function explanationOf({ rank, explanation }) {
  if (!explanation) return null;
  const lines = explanation.sources.flatMap((source) => linesOfSource(source));
  if (explanation.fusion !== "none") {
    const parts = explanation.sources.map(({ part }) => part.toFixed(6)).join(" + ");
    lines.push(`fusion by ${explanation.fusion}: ${parts} = ${explanation.score.toFixed(6)}, rank ${explanation.rank}`);
  }
  if (explanation.reranker !== null)
    lines.push(`re-ranker ${explanation.reranker.toFixed(4)}: rank ${explanation.rank} → ${rank}`);
  if (explanation.filter) lines.push(`filter: ${explanation.filter}`);
  const texts = lines.map((line) => made("p", "", line));
  return made("div", "meta", made("details", "why", made("summary", "", "Why this hit"), ...texts));
}

function linesOfSource(source) {
  if (source.score === null) return [`${source.source}: not found`];
  const list = source.probed_list;
  const probed =
    list && `, list ${list.number} of ${list.lists} (${list.rank === null ? "not" : `${list.rank}.`} of ${list.probed} probed)`;
  const terms = (source.terms ?? []).slice(0, SHOWN_TERMS).map(describeTerm);
  return [`${source.source}: score ${source.score.toFixed(4)}, rank ${source.rank}${probed ?? ""}`, ...terms];
}

function describeTerm({ term, score, query_weight: query, passage_weight: passage }) {
  return `${score.toFixed(4)} ${term} = ${query.toPrecision(4)} × ${passage.toPrecision(4)}`;
}

const valueText = (value) =>
  Array.isArray(value)
    ? value.map(valueText).join(", ")
    : typeof value === "object"
      ? JSON.stringify(value)
      : String(value);

// Returns the metadata of a hit: the first fields, and the others collapsed if they are long.
function metadataOf(metadata) {
  const fields = Object.entries(metadata ?? {})
    .map(([name, value]) => [name, value === null ? "" : valueText(value)])
    .filter(([, text]) => text !== "");
  if (!fields.length) return null;
  let length = 0;
  const count = fields.findIndex(([name, value]) => (length += name.length + value.length + 3) > INLINE);
  const rest = count < 0 ? [] : fields.slice(count);
  const list = (some) =>
    made("dl", "", ...some.map(([name, value]) => made("div", "", made("dt", "", name), made("dd", "", value))));
  const shown = fields.slice(0, fields.length - rest.length);
  return made(
    "div",
    "meta",
    shown.length ? list(shown) : null,
    rest.length
      ? made(
          "details",
          "",
          made("summary", "", shown.length ? `${rest.length} more` : plural(rest.length, "field")),
          list(rest),
        )
      : null,
  );
}

function emptyText(state, choice) {
  const box = made("div", "empty", made("p", "", "Nothing found."));
  if (choice.mode === "bm25")
    box.append(made("p", "", "BM25 finds passages with a word of the query, other than words like “the”."));
  if (state.filter) {
    box.append(
      made(
        "p",
        "",
        "No passage fits the filter and the query. ",
        made("a", { href: hashOf({ ...state, filter: "" }) }, "Search without the filter"),
      ),
    );
  }
  return box;
}

/** Shows the buttons of texts that are cut, once the texts have their size. */
export function showMoreButtons() {
  for (const text of document.querySelectorAll(".text")) {
    text.parentElement.querySelector(".more").hidden =
      text.scrollHeight <= text.clientHeight + 1 && !text.querySelector(".before");
  }
}
