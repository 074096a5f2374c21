"""Measures how much the weights of the basic prompts of a computed prompt (HYPER) differ between queries of stores.

    python benchmarks/prompt_weights.py --task hyper-all-seed0 --stores S/squad S/scifact S/medquad …

Prints mean Jensen-Shannon divergences of two test queries, in nats, within and between the stores, the cosines of the
mean weights of two stores, and the effective number of basic prompts: the mean over the stores of the exponential of
the entropy of their mean weights. prompts/TASK is that of the first store.
"""

from __future__ import annotations

import json

import numpy as np
import torch

from benchmarks.common.program import Parser
from riptide import Store
from riptide.indexing.measures.distributions import cosines
from riptide.indexing.measures.prompt_weights import MeasureAttentionWork
from riptide.indexing.work.local_runner import LocalRunner
from riptide.retriever.objectives.divergence_term import mean_divergences


def main() -> None:
    """Reads the options, computes the weights and prints the figures."""
    parser = Parser(__doc__)
    parser.add("--task", None, "the trained task", required=True)
    parser.add("--stores", None, "the stores, each with one query set", required=True, nargs="+")
    parser.add("--count", 300, "test queries of each store")
    options = parser.parse_args()
    attention = MeasureAttentionWork(Store(options.stores[0]), options.task)
    weights = []
    for store in options.stores:
        texts = Store(store).queries().split("test").texts[: options.count]
        of_queries = attention.weights(texts, LocalRunner())
        weights.append(of_queries[np.isfinite(of_queries).all(1)])  # without queries that have no known word
    numbers = torch.tensor(np.repeat(np.arange(len(weights)), [len(of_store) for of_store in weights]))
    within, between = mean_divergences(torch.from_numpy(np.concatenate(weights)).double(), numbers)
    means = np.stack([of_store.mean(0) for of_store in weights]).astype(np.float64)
    effective = float(np.exp(-(means * np.log(np.maximum(means, 1e-30))).sum(1)).mean())
    figures = {"within": float(within), "between": float(between), "effective_prompts": effective}
    print(json.dumps(figures | {"cosine_of_means": np.round(cosines(means), 4).tolist()}))


if __name__ == "__main__":
    main()
