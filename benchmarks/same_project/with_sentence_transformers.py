"""The project with sentence-transformers, FAISS and ir_measures: dense search only, as it has no BM25."""

import csv
import gzip
import json
import sys

import faiss
import ir_measures
from ir_measures import R, nDCG
from sentence_transformers import SentenceTransformer

data, folder, model_name, question = sys.argv[1:]


def read(name):
    with gzip.open(f"{data}/{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


passages = read("corpus")
with open(f"{data}/qrels/test.tsv", encoding="utf-8") as file:
    qrels = [ir_measures.Qrel(q, p, int(score)) for q, p, score in list(csv.reader(file, delimiter="\t"))[1:]]
judged = {qrel.query_id for qrel in qrels}
queries = [query for query in read("queries") if query["_id"] in judged]

model = SentenceTransformer(model_name, device="cpu")
texts = [f"{passage['title']} {passage['text']}" for passage in passages]
vectors = model.encode(texts, batch_size=32, normalize_embeddings=True)
index = faiss.IndexFlatIP(vectors.shape[1])
index.add(vectors)
faiss.write_index(index, f"{folder}/vectors.faiss")

scores, rows = index.search(model.encode([query["text"] for query in queries], normalize_embeddings=True), 100)
run = [
    ir_measures.ScoredDoc(query["_id"], passages[row]["_id"], float(score))
    for query, row_scores, query_rows in zip(queries, scores, rows, strict=True)
    for score, row in zip(row_scores, query_rows, strict=True)
]
print("dense", ir_measures.calc_aggregate([nDCG @ 10, R @ 100], qrels, run))

for row in index.search(model.encode([question], normalize_embeddings=True), 3)[1][0]:
    print(passages[row]["title"], passages[row]["text"][:70])
