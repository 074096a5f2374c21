// The page of a riptide server: plain calls of its public API, and no other resource.

import { columnsOf, showMoreButtons } from "./hits.js";
import { wordsOf } from "./marks.js";
import { DEFAULTS, hashOf, requestOf, stateOf } from "./state.js";
import { NAMES, made, one, plural, startOf, taskRows, wrongPlace } from "./view.js";

const MOST = 4; // columns
const OPPOSITE = { dense: "bm25", bm25: "dense", exact: "bm25", hybrid: "dense" }; // what + Compare adds first
let info; // what the server says about itself
let tasks = new Map(); // the tasks of the release, by name
let searches = 0;

async function call(path, body) {
  const headers = { "Content-Type": "application/json" };
  const token = sessionStorage.getItem("token");
  if (token) headers.Authorization = `Bearer ${token}`;
  let answer;
  try {
    answer = await fetch(path, body ? { method: "POST", headers, body: JSON.stringify(body) } : { headers });
  } catch {
    throw new Error("The server does not answer. Is it still running?");
  }
  const content = await answer.json().catch(() => ({}));
  if (answer.status === 401) show("token");
  if (!answer.ok) throw new Error(content.error?.message ?? `The server answered with status ${answer.status}.`);
  return content;
}

function show(page) {
  for (const section of document.querySelectorAll("main > section")) section.hidden = section.id !== page;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.page === page) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (page === "token") one("secret").focus();
}

function complain(error) {
  const filter = one("filter").value;
  const isFilter = error.message.startsWith("filter:") && Boolean(filter);
  const box = one(isFilter ? "filter-error" : "error");
  box.replaceChildren(error.message, (isFilter && wrongPlace(filter, error.message)) || "");
  box.hidden = false;
  if (isFilter) one("filter").setAttribute("aria-invalid", "true");
  one("status").textContent = "";
}

function clearErrors() {
  for (const id of ["error", "filter-error"]) one(id).hidden = true;
  one("filter").removeAttribute("aria-invalid");
}

async function begin() {
  const [about, { tasks: served }] = await Promise.all([call("/v1/info"), call("/v1/tasks")]);
  info = about;
  tasks = new Map(served.map((task) => [task.name, task]));
  one("about").textContent = [plural(info.passages, "passage"), info.encoder, plural(served.length, "task")]
    .filter(Boolean)
    .join(" · ");
  one("newer").textContent = `The store has newer artifacts than this release: ${(info.newer ?? []).join(", ")}.`;
  one("newer").hidden = !info.newer?.length;
  one("by-label").hidden = !info.is_split;
  one("reranking").hidden = !info.reranker;
  one("filters").hidden = !Object.keys(info.filters).length;
  listFields();
  one("rows").replaceChildren(...taskRows(served));
  one("start").replaceChildren(...startOf(info, served));
}

const start = () => begin().then(follow, complain);

// Shows what the address describes: a page, or a search, which it runs.
function follow() {
  searches += 1; // an answer to an earlier search is ignored
  clearErrors();
  if (location.hash === "#tasks") {
    begin().catch(complain);
    show("tasks");
    return;
  }
  const state = stateOf(location.hash);
  document.querySelector("nav a[data-page=search]").href = location.hash || "#"; // leads back from the tasks
  fillForm(state);
  show("search");
  document.title = state.q ? `${state.q} – riptide` : "riptide";
  one("start").hidden = Boolean(state.q);
  if (state.q) search(formState());
  else {
    one("columns").replaceChildren();
    one("status").textContent = "";
    one("query").focus();
  }
}

function fillForm(state) {
  one("query").value = state.q;
  one("filter").value = state.filter;
  one("k").value = state.k;
  one("by").value = state.by;
  one("rerank").checked = state.rerank > 0;
  one("explain").checked = state.explain > 0;
  if (state.rerank) one("depth").value = state.rerank;
  listChoices(state.columns.length ? state.columns : [{}]);
}

function formState() {
  const boxes = [...document.querySelectorAll("#choices > fieldset")];
  const columns = boxes.map((box) => ({
    task: box.querySelector(".task").value,
    ...choiceOf(box.querySelector(".source")),
  }));
  const rerank = info.reranker && one("rerank").checked ? Number(one("depth").value) : 0;
  const k = Number(one("k").value) || DEFAULTS.k;
  const explain = Number(one("explain").checked);
  return { q: one("query").value.trim(), filter: one("filter").value, k, by: one("by").value, rerank, explain, columns };
}

// Makes the address that of the form, which runs the search.
function submit() {
  if (!info) {
    // The server did not answer when the page was opened, for example as it was starting.
    history.replaceState(null, "", hashOf({ q: one("query").value.trim() }));
    start();
    return;
  }
  const state = formState();
  if (!state.q) return;
  if (hashOf(state) === location.hash) follow();
  else location.hash = hashOf(state);
}

function submitIfSearched() {
  if (one("query").value.trim() && one("ask").reportValidity()) submit();
}

// Shows a task and a source to choose for each column.
function listChoices(columns) {
  const boxes = columns.slice(0, MOST).map((choice, place) => {
    const task = made("select", { className: "task", ariaLabel: "Task" });
    const source = made("select", { className: "source", ariaLabel: "Source" });
    const drop = made(
      "button",
      { type: "button", className: "plain", hidden: columns.length < 2, ariaLabel: `Remove column ${place + 1}` },
      "×",
    );
    task.append(...[...tasks.keys()].map((name) => new Option(name, name)));
    select(task, choice.task ?? (tasks.has("default") ? "default" : task.value));
    task.hidden = tasks.size < 2 && tasks.has(task.value);
    listSources(source, task.value, choice, true);
    task.addEventListener("change", () => {
      listSources(source, task.value, choiceOf(source), /[+*]/.test(source.value));
      submitIfSearched();
    });
    source.addEventListener("change", submitIfSearched);
    drop.addEventListener("click", () => {
      listChoices(formState().columns.filter((_, other) => other !== place));
      submitIfSearched();
    });
    return made(
      "fieldset",
      "",
      made("legend", "unseen", columns.length > 1 ? `Column ${place + 1}` : "Search in"),
      task,
      source,
      drop,
    );
  });
  one("choices").replaceChildren(...boxes);
  // A task that has only one source lists it and its mode.
  const isOnlyOne = tasks.size < 2 && document.querySelectorAll("#choices .source option").length < 3;
  one("compare").hidden = isOnlyOne || columns.length >= MOST;
}

// Lists the modes and the sources of a task. If it lacks the chosen one, its first one is chosen instead, unless the
// chosen one is to be kept, as a fusion or one that an address names by mistake.
function listSources(source, name, { mode, source: text }, isKept) {
  const task = tasks.get(name) ?? { modes: [], sources: [] };
  const sources = made(
    "optgroup",
    { label: "one source" },
    ...task.sources.map((one) => new Option(one, `source=${one}`)),
  );
  source.replaceChildren(...task.modes.map((mode) => new Option(NAMES[mode] ?? mode, `mode=${mode}`)), sources);
  const wanted = text ? `source=${text}` : mode && `mode=${mode}`;
  const isServed = [...source.options].some((option) => option.value === wanted);
  if (wanted && (isServed || isKept)) select(source, wanted, text ?? mode);
}

const choiceOf = (source) => Object.fromEntries([source.value.split(/=(.*)/s).slice(0, 2)]);

// Selects a value, which is added if it is not listed.
function select(element, value, text = value) {
  if (![...element.options].some((option) => option.value === value)) element.append(new Option(text, value));
  element.value = value;
}

// Adds a column for what is not shown yet: another mode of the last task, the same in another task, a source.
function addColumn() {
  const { columns } = formState();
  const last = columns.at(-1);
  const { modes, sources } = tasks.get(last.task) ?? { modes: [], sources: [] };
  const candidates = [
    ...[OPPOSITE[last.mode], "hybrid", ...modes]
      .filter((mode) => modes.includes(mode))
      .map((mode) => ({ task: last.task, mode })),
    ...[...tasks.keys()].map((task) => ({ ...last, task })),
    ...sources.map((source) => ({ task: last.task, source })),
  ];
  const same = (a, b) => a.task === b.task && a.mode === b.mode && a.source === b.source;
  const added = candidates.find((choice) => !columns.some((other) => same(choice, other)));
  listChoices([...columns, added ?? last]);
  submitIfSearched();
  document.querySelector("#choices > fieldset:last-child .source").focus();
}

// Lists the fields that filters can name; a click puts one into the filter.
function listFields() {
  const example = { int64: "2000", float64: "0.5", bool: "true", timestamp: "2000-01-01" };
  const fields = Object.entries(info.filters).map(([name, type]) => {
    const value = example[type.replace(/^list\[(.*)\]$/, "$1")] ?? "word";
    const written = /^[^\s"'=<>!(),]+$/.test(name) ? name : `"${name.replace(/["\\]/g, "\\$&")}"`;
    const button = made(
      "button",
      { type: "button", className: "chip", title: `Add ${name} to the filter` },
      name,
      made("small", "", type),
    );
    button.addEventListener("click", () => {
      const filter = one("filter");
      filter.value = `${filter.value.trim()}${filter.value.trim() ? " and " : ""}${written} = ${value}`;
      filter.focus();
      filter.setSelectionRange(filter.value.length - value.length, filter.value.length);
    });
    return button;
  });
  one("fields").replaceChildren(...fields);
}

async function search(state) {
  const turn = ++searches;
  one("columns").ariaBusy = "true";
  one("status").textContent = "Searching …";
  const calls = state.columns.map(async (choice) => {
    const request = requestOf(state, choice, info.is_split);
    return { request, ...(await call("/v1/search", request)) };
  });
  const answers = (await Promise.allSettled(calls)).map(({ value, reason }) => value ?? reason);
  if (turn !== searches) return;
  one("columns").ariaBusy = "false";
  const found = answers.filter((answer) => !(answer instanceof Error));
  if (!found.length) {
    one("columns").replaceChildren();
    complain(answers[0]);
    return;
  }
  const words = wordsOf(state.q, new Set(info.stop_words));
  one("columns").replaceChildren(...columnsOf(answers, state, words, tasks.size < 2));
  showMoreButtons();
  const count = found.reduce((total, answer) => total + answer.results[0].hits.length, 0);
  const [first] = found;
  const where = found.length > 1 ? `in ${found.length} columns` : `for task ${first.task}`;
  one("status").textContent = `${plural(count, "hit")} ${where}, release ${first.release}`;
}

const itemsOf = (column) => [...column.querySelectorAll("li")];

function toggleText(item) {
  const button = item.querySelector(".more");
  if (button.hidden) return;
  const isWhole = item.classList.toggle("whole");
  button.ariaExpanded = String(isWhole);
  button.textContent = isWhole ? "Less" : "Whole text";
}

// Marks the passage of a hit in all columns.
function markSame(item) {
  for (const other of document.querySelectorAll("#columns li")) {
    other.classList.toggle(
      "same",
      Boolean(item?.classList.contains("shared")) && other.dataset.key === item.dataset.key,
    );
  }
}

// Returns the hit that a key leads to from a hit.
function neighbour(item, key) {
  const columns = [...document.querySelectorAll("#columns > section")].map(itemsOf);
  const column = columns.findIndex((items) => items.includes(item));
  const place = columns[column].indexOf(item);
  if (key === "ArrowDown" || key === "ArrowUp") return columns[column][place + (key === "ArrowDown" ? 1 : -1)];
  const other = columns[column + (key === "ArrowRight" ? 1 : -1)] ?? [];
  return other.find((one) => one.dataset.key === item.dataset.key) ?? other[Math.min(place, other.length - 1)];
}

function onKey(event) {
  const { target, key } = event;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (key === "/" && !["INPUT", "SELECT", "TEXTAREA"].includes(target.tagName)) {
    event.preventDefault();
    if (location.hash === "#tasks") location.hash = "";
    one("query").select();
  }
  const item = target.closest?.("#columns li");
  if (!item) return;
  if (key === "Escape") one("query").focus();
  if (key === "Enter" && target === item) toggleText(item);
  const next = key.startsWith("Arrow") && neighbour(item, key);
  if (next) {
    event.preventDefault();
    next.focus();
  }
}

function onClick({ target }) {
  const item = target.closest("#columns li");
  if (item && target.closest(".more")) toggleText(item);
  if (item && target.closest("button.change")) {
    itemsOf(one("columns").firstChild)
      .find((other) => other.dataset.key === item.dataset.key)
      ?.focus();
  }
}

one("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
for (const id of ["by", "rerank", "explain"]) one(id).addEventListener("change", submitIfSearched);
one("compare").addEventListener("click", addColumn);
one("columns").addEventListener("click", onClick);
for (const kind of ["mouseover", "focusin"]) {
  one("columns").addEventListener(kind, ({ target }) => markSame(target.closest("li")));
}
for (const kind of ["mouseleave", "focusout"]) one("columns").addEventListener(kind, () => markSame(null));
one("give").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", one("secret").value);
  one("secret").value = "";
  clearErrors();
  start();
});
document.addEventListener("keydown", onKey);
window.addEventListener("hashchange", () => {
  if (info) follow();
});
start();
