"""Estimates time and price of a whole new encoding on a cluster, as `encode-corpus --plan --cluster` does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.jobs.common.plans import planned_jobs
from riptide.jobs.encode_corpus import EncodeCorpus
from riptide.jobs.migration.both_encoders import BothEncoders
from riptide.jobs.migration.migrate_options import Migrate


@dataclass(frozen=True)
class ClusterCost:
    """Time and price of an encoding on a cluster.

    Attributes:
        machine: The cluster.
        seconds: The time.
        price: The price of the nodes and of the requests to the object store.
        currency: Its currency.
        source: Whose prices these are, and their date.
        text: Time and price for messages.
    """

    machine: str
    seconds: float
    price: float
    currency: str
    source: str
    text: str


def estimate_encoding_cost(both: BothEncoders, options: Migrate) -> ClusterCost | None:
    """Returns time and price of the encoding of all passages on the cluster of the options; None without one.

    Raises:
        InputError: For a bad cluster file, or if the size of the encoder is unknown.
    """
    if options.cluster is None:
        return None
    from riptide.jobs.planning.estimate import NOTHING
    from riptide.jobs.planning.planner import Planner

    parameter, value = both.spec.named_by
    # A name that no embeddings have: an existing encoding would cost nothing.
    names: dict[str, Any] = {parameter: value, "name": f"{both.new_name}.forecast"}
    planner = Planner(options.cluster)
    estimate = planner.estimate(
        planned_jobs("encode_corpus", EncodeCorpus(store=both.store.url, vectors=options.vectors, **names))
    )
    if estimate is None or estimate is NOTHING:
        raise InputError(
            f"{Parameter('cluster', options.cluster)}: the size of {value} is unknown, expected an encoder whose "
            "config.json has the sizes of a transformer; leave the parameter out"
        )
    machine = planner.machine(both.store.url)
    assert machine.price is not None, "read_cluster requires it"
    price = estimate.price(machine)
    assert price is not None
    source = f"{machine.price.source}, {machine.price.date}"
    text = estimate.describe_cost(machine)
    return ClusterCost(machine.title, estimate.seconds(machine), price, machine.price.currency, source, text)
