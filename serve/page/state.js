// The search that the address of the page describes, after its #: the server never sees it, and a link repeats it.

export const DEFAULTS = { q: "", filter: "", k: 10, by: "document", rerank: 0, explain: 0, columns: [] };

/** Returns the state of an address. A column begins with its task, followed by its mode or its source. */
export function stateOf(hash) {
  const state = { ...DEFAULTS, columns: [] };
  for (const [name, value] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (name === "task") state.columns.push({ task: value });
    else if (name === "mode" || name === "source") {
      const last = state.columns.at(-1);
      if (last && !last.mode && !last.source) last[name] = value;
      else state.columns.push({ [name]: value });
    } else if (["k", "rerank", "explain"].includes(name)) state[name] = Number(value) || DEFAULTS[name];
    else if (["q", "filter", "by"].includes(name)) state[name] = value;
  }
  return state;
}

/** Returns the address of a state; what has its default is left out. */
export function hashOf(state) {
  const fields = new URLSearchParams();
  for (const name of ["q", "filter", "k", "by", "rerank", "explain"]) {
    const value = state[name] ?? DEFAULTS[name];
    if (value !== DEFAULTS[name]) fields.append(name, value);
  }
  for (const { task, mode, source } of state.columns ?? []) {
    if (task) fields.append("task", task);
    if (source) fields.append("source", source);
    else if (mode) fields.append("mode", mode);
  }
  return `#${fields}`;
}

/** Returns the body of the request of a column. */
export function requestOf(state, choice, isSplit) {
  const body = { query: state.q, k: state.k, task: choice.task, allow_partial: true };
  if (choice.source) body.source = choice.source;
  else body.mode = choice.mode;
  if (isSplit) body.by = state.by;
  if (state.filter.trim()) body.filter = state.filter;
  if (state.rerank) body.rerank = state.rerank;
  if (state.explain) body.explain = true;
  return body;
}

/** Returns the URL of an answered request and its hits, as a line of a file for `riptide replay`. */
export function savedRequestOf({ request, release, raised_settings, results: [{ hits }] }) {
  const line = JSON.stringify({ request, release, raised_settings, hits: hits.map(({ id }) => ({ id })) });
  return `data:application/x-ndjson;charset=utf-8,${encodeURIComponent(`${line}\n`)}`;
}
