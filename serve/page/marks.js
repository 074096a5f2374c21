// Marks the words of a query in a text, by the rules of indexing/search/snippets.py.

const EXCERPT = 200; // characters of a text that are shown in any case
const MOST = 200; // marks among which the excerpt is chosen
const CONTEXT = 40; // characters of it before the first marked word
const UNSPACED = ["Han", "Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar"]
  .map((name) => `\\p{sc=${name}}`)
  .join("");
const WORD = `(?:(?![${UNSPACED}])[\\p{L}\\p{M}\\p{N}_])`;
// In scripts without spaces each character is a token. An English contraction is one word, the s of a genitive is not.
const TOKEN = new RegExp(
  `(?<character>[${UNSPACED}])|(?<genitive>(?<=${WORD}['’])s(?!${WORD}))|${WORD}+(?:['’](?:t|m|re|ve|ll|d)(?!${WORD}))?`,
  "giu",
);

// Changing the case twice unites the spellings of a letter that has no single capital, such as the German ß.
const normal = (word) => word.normalize("NFKC").toUpperCase().toLowerCase().normalize("NFKC").replaceAll("’", "'");

function tokensOf(text) {
  const matches = [...text.matchAll(TOKEN)].filter((match) => !match.groups.genitive);
  return matches.map((match) => ({
    start: match.index,
    end: match.index + match[0].length,
    key: normal(match[0]),
    isCharacter: Boolean(match.groups.character),
  }));
}

// Returns the runs of adjacent characters of scripts without spaces.
function runsOf(tokens) {
  const runs = [];
  for (const token of tokens.filter((one) => one.isCharacter)) {
    if (runs.at(-1)?.at(-1).end === token.start) runs.at(-1).push(token);
    else runs.push([token]);
  }
  return runs;
}

const pairsOf = (run) => run.slice(1).map((token, place) => [run[place], token]);
const pairKey = ([a, b]) => a.key + b.key;

/** Returns the words of a query to mark: without stop words, unless the query has nothing else. */
export function wordsOf(query, stopWords) {
  const tokens = tokensOf(query);
  const meaningful = tokens.filter((token) => !stopWords.has(token.key));
  const kept = meaningful.length ? meaningful : tokens;
  const runs = runsOf(kept);
  return {
    words: new Set(kept.filter((token) => !token.isCharacter).map((token) => token.key)),
    characters: new Set(runs.filter((run) => run.length === 1).map(([token]) => token.key)),
    pairs: new Set(runs.flatMap(pairsOf).map(pairKey)),
  };
}

/** Returns the spans [start, end) of a text to mark; adjacent characters share one. */
export function spansOf(text, { words, characters, pairs }) {
  const tokens = tokensOf(text);
  const found = new Set(tokens.filter((token) => (token.isCharacter ? characters : words).has(token.key)));
  for (const pair of runsOf(tokens).flatMap(pairsOf)) {
    if (pairs.has(pairKey(pair))) pair.forEach((token) => found.add(token));
  }
  const spans = [];
  for (const token of tokens.filter((one) => found.has(one))) {
    if (token.isCharacter && spans.at(-1)?.[1] === token.start) spans.at(-1)[1] = token.end;
    else spans.push([token.start, token.end]);
  }
  return spans;
}

/** Returns where an excerpt of a text begins, so that it has the most distinct marked words; 0: it is not cut. */
export function excerptStart(text, allSpans) {
  const spans = allSpans.slice(0, MOST);
  const count = ([start]) => {
    const inside = spans.filter(([from, to]) => from >= start && to <= start + EXCERPT);
    return new Set(inside.map(([from, to]) => normal(text.slice(from, to)))).size;
  };
  const best = spans.reduce((found, span) => (count(span) > count(found) ? span : found), [0, 0]);
  const context = Math.max(0, best[0] - CONTEXT);
  return best[0] < EXCERPT / 2 ? 0 : context + text.slice(context, best[0]).search(/(?<=\s)\S|$/u);
}

/** Returns a text as nodes: strings, and a <mark> for each span. */
export function marked(text, spans) {
  const nodes = [];
  let at = 0;
  for (const [start, end] of spans) {
    const mark = document.createElement("mark");
    mark.textContent = text.slice(start, end);
    nodes.push(text.slice(at, start), mark);
    at = end;
  }
  return [...nodes, text.slice(at)];
}
