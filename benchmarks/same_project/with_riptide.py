"""The project with riptide: BM25, dense and hybrid search."""

import sys

import riptide

data, folder, model_name, question = sys.argv[1:]

store = riptide.Store(f"{folder}/store")
store.import_corpus(data)
store.build_bm25()
store.encode_corpus(model_name, name="minilm")

print(store.evaluate(["bm25", "exact:minilm", "hybrid"], split="test", metrics=["nDCG@10", "R@100"]))

for hit in store.search("hybrid")(question, k=3):
    print(hit.title, hit.text[:70])
