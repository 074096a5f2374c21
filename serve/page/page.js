// The page of a riptide server: plain calls of its public API.
"use strict";

const one = (id) => document.getElementById(id);
const made = (name, text, className) => {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
};
const NAMES = { dense: "Dense", exact: "Exact", bm25: "BM25", hybrid: "Hybrid" };
const SOURCE = "source:"; // before the value of an option that is a source, not a mode
let modes = ["dense", "exact"]; // of the chosen task
let tasksOf = {}; // the tasks of the release, by name
let asked = 0;

async function call(path, body) {
  const headers = { "Content-Type": "application/json" };
  const token = sessionStorage.getItem("token");
  if (token) headers.Authorization = `Bearer ${token}`;
  let answer;
  try {
    answer = await fetch(path, body ? { method: "POST", headers, body: JSON.stringify(body) } : { headers });
  } catch {
    throw new Error("The server does not answer.");
  }
  const document = await answer.json().catch(() => ({}));
  if (answer.status === 401) show("token");
  if (!answer.ok) throw new Error(document.error ? document.error.message : `The server answered ${answer.status}.`);
  return document;
}

function complain(error) {
  one("error").textContent = error.message;
  one("error").hidden = false;
  one("status").textContent = "";
}

function show(page) {
  for (const section of document.querySelectorAll("main > section")) section.hidden = section.id !== page;
  for (const button of document.querySelectorAll("nav button")) {
    if (button.dataset.page === page) {
      button.hidden = false;
      button.setAttribute("aria-current", "page");
    } else button.removeAttribute("aria-current");
  }
  if (page === "search") one("query").focus();
  if (page === "token") one("secret").focus();
}

async function begin() {
  const [info, tasks] = await Promise.all([call("/v1/info"), call("/v1/tasks")]);
  one("about").textContent =
    `${info.passages.toLocaleString("en")} passages${info.encoder ? ` · ${info.encoder}` : ""} · ${info.tasks.length} ${info.tasks.length === 1 ? "task" : "tasks"} · release ${info.release}`;
  one("newer").textContent = `The store has newer artifacts than this release: ${(info.newer ?? []).join(", ")}.`;
  one("by-label").hidden = !info.is_split;
  one("newer").hidden = !info.newer?.length;
  listFilters(info.filters);
  tasksOf = Object.fromEntries(tasks.tasks.map((task) => [task.name, task]));
  const chosen = one("task").value || new URLSearchParams(location.search).get("task");
  one("task").replaceChildren(...tasks.tasks.map((task) => new Option(task.name, task.name, false, task.name === chosen)));
  listModes();
  one("rows").replaceChildren(...tasks.tasks.map((task) => {
    const row = made("tr");
    const sides = Object.entries(task.length).map(([side, length]) => `${length} (${side})`).join(", ");
    const index = task.index || (task.embeddings ? `${task.embeddings} (every vector)` : "none");
    for (const text of [task.name, task.prompt ? task.prompt.slice(0, 12) : "none", sides, index, task.bm25 || ""]) {
      row.append(made("td", text));
    }
    return row;
  }));
}

// Lists the modes and the sources of the chosen task. If the task lacks what was chosen, its first one is chosen.
function listModes() {
  const chosen = one("mode").value;
  const task = tasksOf[one("task").value] || { modes: [], sources: [] };
  modes = task.modes;
  for (const option of document.querySelectorAll("#mode > option")) {
    option.hidden = !(option.value === "side" ? modes.length : modes.includes(option.value));
  }
  one("sources").replaceChildren(...task.sources.map((source) => new Option(source, `${SOURCE}${source}`)));
  const options = [...one("mode").options].filter((option) => !option.hidden);
  const option = options.find(({ value }) => value === chosen) || options[0];
  if (option) one("mode").value = option.value;
}

// Shows the field for a filter, with the metadata fields that the corpus can filter by and an example.
function listFilters(types) {
  const names = Object.keys(types);
  one("filters").hidden = !names.length;
  if (!names.length) return;
  const value = (type) => ({ int64: "2000", float64: "0.5", bool: "true", timestamp: "2000-01-01" }[type] || "word");
  const example = names.slice(0, 2).map((name) => `${name} = ${value(types[name].replace(/^list\[(.*)\]$/, "$1"))}`);
  one("filter").placeholder = example.join(" and ");
  const fields = names.map((name) => `${name} (${types[name]})`).join(", ");
  one("fields").textContent = `Fields: ${fields}. Operators: = != < <= > >= in (a, b) and or not; = null: no value.`;
}

function column(mode, found) {
  const box = made("section");
  const [result] = found.results;
  const { shards } = result;
  box.append(made("h2", NAMES[mode] || mode.slice(SOURCE.length)));
  box.append(made("p", `${found.took_ms.total.toFixed(1)} ms · ${shards.successful} of ${shards.total} shards`, "facts"));
  const stages = made("div", undefined, "stages");
  const known = Object.entries(found.took_ms).filter(([stage]) => stage !== "total");
  const sum = known.reduce((total, [, ms]) => total + ms, 0) || 1;
  for (const [stage, ms] of known) {
    const bar = made("i");
    bar.style.width = `${(100 * ms) / sum}%`;
    stages.append(bar);
  }
  stages.setAttribute("aria-hidden", "true");
  box.append(stages, made("p", known.map(([stage, ms]) => `${stage} ${ms.toFixed(1)} ms`).join(" · "), "facts"));
  const list = made("ol");
  for (const hit of result.hits) {
    const item = made("li");
    item.tabIndex = 0;
    item.append(made("h3", `${hit.rank}. ${hit.title || hit.document || hit.id}`), made("p", hit.text, "more"));
    const from = Object.entries(hit.scores).map(([source, score]) => `${source} ${score.toFixed(4)}`).join(" · ");
    item.append(made("p", `${hit.id} · ${hit.score.toFixed(4)}${from ? ` · from ${from}` : ""}`, "from"));
    list.append(item);
  }
  box.append(result.hits.length ? list : made("p", "Nothing found."));
  return box;
}

async function search() {
  const query = one("query").value.trim();
  if (!query) return;
  const turn = ++asked;
  const wanted = one("mode").value === "side" ? ["dense", "bm25", "hybrid"].filter((mode) => modes.includes(mode))
    : [one("mode").value];
  one("error").hidden = true;
  one("status").textContent = "Searching …";
  const body = { query, task: one("task").value, k: Number(one("k").value) || 10, by: one("by").value, allow_partial: true };
  const filter = one("filter").value.trim();
  if (filter) body.filter = filter;
  try {
    const found = await Promise.all(wanted.map((mode) => call("/v1/search",
      mode.startsWith(SOURCE) ? { ...body, source: mode.slice(SOURCE.length) } : { ...body, mode })));
    if (turn !== asked) return;
    one("columns").replaceChildren(...found.map((answer, place) => column(wanted[place], answer)));
    const count = found.reduce((total, answer) => total + answer.results[0].hits.length, 0);
    one("status").textContent = `${count} hits for task ${found[0].task}, release ${found[0].release}`;
  } catch (error) {
    if (turn !== asked) return;
    one("columns").replaceChildren();
    complain(error);
  }
}

one("ask").addEventListener("submit", (event) => { event.preventDefault(); search(); });
one("task").addEventListener("change", () => { listModes(); search(); });
one("mode").addEventListener("change", search);
one("by").addEventListener("change", search);
one("give").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", one("secret").value);
  one("secret").value = "";
  one("error").hidden = true;
  begin().then(() => show("search"), complain);
});
for (const button of document.querySelectorAll("nav button")) {
  button.addEventListener("click", () => {
    one("error").hidden = true;
    show(button.dataset.page);
    if (button.dataset.page === "tasks") begin().catch(complain);
  });
}
document.addEventListener("keydown", (event) => {
  const typing = ["INPUT", "SELECT", "TEXTAREA"].includes(document.activeElement.tagName);
  if (event.key === "/" && !typing) { event.preventDefault(); show("search"); one("query").select(); }
  if (["ArrowDown", "ArrowUp"].includes(event.key) && document.activeElement.tagName === "LI") {
    const items = [...document.querySelectorAll("li")];
    const next = items[items.indexOf(document.activeElement) + (event.key === "ArrowDown" ? 1 : -1)];
    if (next) { event.preventDefault(); next.focus(); }
  }
});
begin().catch(complain);
