"""The list of metrics and its table in docs/serving.md, which is written again with RIPTIDE_WRITE_TABLES=1."""

from __future__ import annotations

import os
import re
from pathlib import Path

from riptide.serve.server_metrics import CONNECTION_METRICS, METRICS, Metric, PrometheusExporter

PAGE = Path(__file__).resolve().parents[2] / "docs" / "serving.md"
HEADER = "| metric | kind | labels | meaning |\n| --- | --- | --- | --- |\n"
TABLE = re.compile(re.escape(HEADER) + r"(?:\|.*\n)*")


def row(metric: Metric) -> str:
    name = f"riptide_{metric.name}{'_total' if metric.kind == 'Counter' else ''}"
    return (
        f"| `{name}` | {metric.kind.lower()} | {', '.join(f'`{label}`' for label in metric.labels)} | {metric.help} |\n"
    )


def test_the_table_lists_every_metric() -> None:
    table = HEADER + "".join(row(metric) for metric in METRICS + CONNECTION_METRICS)
    if os.environ.get("RIPTIDE_WRITE_TABLES"):
        PAGE.write_text(TABLE.sub(lambda _: table, PAGE.read_text()))
    assert TABLE.findall(PAGE.read_text()) == [table]


def test_prometheus_gets_counts_observations_and_last_values() -> None:
    exporter = PrometheusExporter("s3://bucket/s")
    record = {metric.name: exporter.add(metric) for metric in METRICS}
    for status in ("200", "200", "503"):
        record["requests"](1, "/v1/search", status)
    record["shard_errors"](0, "failed")
    for seconds in (0.02, 0.03, 70.0):
        record["stage_seconds"](seconds, "encode")
    for tasks in (3, 2):
        record["tasks"](tasks)
    for mode in ("dense", "hybrid"):
        record["recall"](0.5, "t", mode, "1-10", "none")
    exporter.remove("recall", "t", "dense", "1-10", "none")  # a group of a removed task
    lines = exporter.render().decode().splitlines()
    assert [line for line in lines if line.startswith("riptide_recall{")] == [
        'riptide_recall{filter="none",k="1-10",mode="hybrid",store="s3://bucket/s",task="t"} 0.5'
    ]
    assert {
        'riptide_requests_total{route="/v1/search",status="200",store="s3://bucket/s"} 2.0',
        'riptide_requests_total{route="/v1/search",status="503",store="s3://bucket/s"} 1.0',
        'riptide_shard_errors_total{how="failed",store="s3://bucket/s"} 0.0',
        'riptide_stage_seconds_bucket{le="0.025",stage="encode",store="s3://bucket/s"} 1.0',
        'riptide_stage_seconds_bucket{le="30.0",stage="encode",store="s3://bucket/s"} 2.0',
        'riptide_stage_seconds_count{stage="encode",store="s3://bucket/s"} 3.0',
        'riptide_tasks{store="s3://bucket/s"} 2.0',
        'riptide_embedding_tokens_total{store="s3://bucket/s"} 0.0',
    } <= set(lines)
