"""The project with Pyserini: BM25, dense and hybrid search."""

import csv
import gzip
import json
import os
import subprocess
import sys

import ir_measures
from ir_measures import R, nDCG
from pyserini.encode import AutoQueryEncoder
from pyserini.search.faiss import FaissSearcher
from pyserini.search.hybrid import HybridSearcher
from pyserini.search.lucene import LuceneSearcher

data, folder, model_name, question = sys.argv[1:]


def read(name):
    with gzip.open(f"{data}/{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


os.makedirs(f"{folder}/passages")
with open(f"{folder}/passages/corpus.jsonl", "w", encoding="utf-8") as file:
    for passage in read("corpus"):
        contents = f"{passage['title']} {passage['text']}"
        file.write(json.dumps({"id": passage["_id"], "contents": contents}) + "\n")

indexing = [f"--input={folder}/passages", f"--index={folder}/lucene", "--collection=JsonCollection", "--storeRaw"]
indexing += ["--generator=DefaultLuceneDocumentGenerator", "--threads=2"]
subprocess.run([sys.executable, "-m", "pyserini.index.lucene", *indexing], check=True)

encoding = ["input", f"--corpus={folder}/passages", "--fields", "text", "--delimiter=\n\n\n"]
encoding += ["output", f"--embeddings={folder}/faiss", "--to-faiss"]
encoding += ["encoder", f"--encoder={model_name}", "--encoder-class=auto", "--fields", "text", "--batch-size=32"]
encoding += ["--device=cpu", "--pooling=mean", "--l2-norm", "--dimension=384"]
subprocess.run([sys.executable, "-m", "pyserini.encode", *encoding], check=True)

with open(f"{data}/qrels/test.tsv", encoding="utf-8") as file:
    qrels = [ir_measures.Qrel(q, p, int(score)) for q, p, score in list(csv.reader(file, delimiter="\t"))[1:]]
judged = {qrel.query_id for qrel in qrels}
queries = {query["_id"]: query["text"] for query in read("queries") if query["_id"] in judged}

bm25 = LuceneSearcher(f"{folder}/lucene")
dense = FaissSearcher(f"{folder}/faiss", AutoQueryEncoder(model_name, device="cpu", pooling="mean", l2_norm=True))
hybrid = HybridSearcher(dense, bm25)
ids, texts = list(queries), list(queries.values())
runs = {
    "bm25": bm25.batch_search(texts, ids, k=100, threads=2),
    "dense": dense.batch_search(texts, ids, k=100, threads=2),
    "hybrid": hybrid.batch_search(texts, ids, k0=100, k=100, threads=2, alpha=1.0, normalization=True),
}
for name, hits in runs.items():
    run = [ir_measures.ScoredDoc(query, hit.docid, float(hit.score)) for query in ids for hit in hits[query]]
    print(name, ir_measures.calc_aggregate([nDCG @ 10, R @ 100], qrels, run))

for hit in hybrid.search(question, k0=100, k=3, alpha=1.0, normalization=True):
    print(json.loads(bm25.doc(hit.docid).raw())["contents"][:90])
