"use strict";
const articles = [...document.querySelectorAll("article")];
const buttons = [...document.querySelectorAll("button[data-verdict]")];
const identity = document.querySelector("main").dataset.identity;
const key = "riptide-judging-" + identity;
const pairOf = (article) => article.dataset.pair; // JSON: [query id, passage id]
let verdicts = {};
// Browsers may refuse storage to a page of a local file. Then a reload of the page loses its verdicts.
try { verdicts = JSON.parse(localStorage.getItem(key)) || {}; } catch (error) { verdicts = {}; }
let current = Math.max(0, articles.findIndex((article) => !(pairOf(article) in verdicts)));

function show() {
  articles.forEach((article, at) => { article.hidden = at !== current; });
  const verdict = articles.length ? verdicts[pairOf(articles[current])] : undefined;
  buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.verdict === verdict)));
  const judged = articles.filter((article) => pairOf(article) in verdicts).length;
  document.getElementById("progress").textContent =
    `${articles.length ? current + 1 : 0} of ${articles.length}, ${judged} judged`;
  window.scrollTo(0, 0);
}

function move(step) {
  current = Math.min(Math.max(current + step, 0), Math.max(articles.length - 1, 0));
  show();
}

function judge(verdict) {
  if (!articles.length) return;
  verdicts[pairOf(articles[current])] = verdict;
  try { localStorage.setItem(key, JSON.stringify(verdicts)); } catch (error) { /* as above */ }
  move(1);
}

function lines() {
  return articles.map(pairOf).filter((pair) => pair in verdicts).map((pair) => {
    const [query, id] = JSON.parse(pair);
    return JSON.stringify({ query_id: query, id: id, verdict: verdicts[pair] }) + "\n";
  }).join("");
}

function save() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([lines()], { type: "application/x-ndjson" }));
  // A browser would rename a second verdicts.jsonl, and the same command would read the first one again.
  const time = new Date().toISOString().slice(0, 19).replace(/[-:]/g, "").replace("T", "-");
  link.download = `verdicts-${identity}-${time}.jsonl`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function onClick(button, action) {
  button.addEventListener("click", (event) => {
    if (event.detail) button.blur(); // after a click of the mouse, the space bar must not press the button again
    action();
  });
}

buttons.forEach((button) => onClick(button, () => judge(button.dataset.verdict)));
onClick(document.getElementById("back"), () => move(-1));
onClick(document.getElementById("save"), save);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.repeat) { // a key that is held judges one pair
    if (event.key === "Enter") event.preventDefault();
    return;
  }
  const actions = {
    r: () => judge("relevant"), n: () => judge("not"), s: () => judge("skip"),
    ArrowLeft: () => move(-1), ArrowRight: () => move(1),
  };
  const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (action) { event.preventDefault(); action(); }
});
show();
