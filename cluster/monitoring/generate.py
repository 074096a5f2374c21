"""Write alerts.yaml for Prometheus, dashboard.json for Grafana, and kubernetes.yaml with both, from the lists below.

python cluster/monitoring/generate.py

Names that begin with `ray_riptide_` are those of jobs/common/job_metrics.py and serve/server_metrics.py; those of a
server without Ray Serve lack `ray_`. All others are Ray's own.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Alert:
    """An alert: `expr` has been true for the time `wait`."""

    name: str
    expr: str
    wait: str
    severity: str
    summary: str
    description: str


@dataclass(frozen=True)
class Panel:
    """A panel of the dashboard: pairs of a query and the legend of its series, in a unit of Grafana."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


# Labels that tell tenants apart: those of a stage of a job, and of a job.
JOB = "store, submission, job_name"
STAGE = f"{JOB}, artifact, stage"
ARTIFACT_LEGEND = "{{store}} {{artifact}}"
STAGE_LEGEND = "{{store}} {{artifact}} {{stage}}"
CHOSEN = 'store=~"$store", submission=~"$submission"'  # the choice of the user of the dashboard
# Each job exports the first, and each server the second, with and without Ray Serve.
CHOICES = '{__name__=~"ray_riptide_running|(ray_)?riptide_tasks"}'
# Tasks of riptide's workers, by the names of indexing/work/worker_tasks.py; Ray Data puts its own words around a name.
# Probes are left out, because jobs end them. Ray's own tasks fail in normal operation, for example JobSupervisor.ping.
PARTS = 'Name=~".*riptide [a-z].*", Name!~"probe.*"'
ERRORS = (
    'sum by (application) (rate(ray_serve_num_http_error_requests_total{error_code=~"5.."}[5m]))'
    " / sum by (application) (rate(ray_serve_num_http_requests_total[5m]))"
)
QUEUES = "ray_serve_deployment_queued_queries|ray_riptide_(filters|search|embeddings|rerank)_queue_length"
QUEUED = f'sum by (application, deployment) ({{__name__=~"{QUEUES}"}})'
RECALL = "store, task, mode, k, filter"  # labels of the searches whose recall is estimated together
RECALL_LEGEND = "{{store}} {{task}} {{mode}} k {{k}} filter {{filter}}"
RAISED = "store, task, mode, source"  # labels of the searches whose search setting is raised together
RAISED_LEGEND = "{{store}} {{task}} {{mode}} {{source}}"


def served(name: str) -> str:
    """Returns the selector of a metric of servers, with and without Ray Serve."""
    return f'{{__name__=~"(ray_)?riptide_{name}", {CHOSEN}}}'


def sampled(name: str) -> str:
    """Returns the selector of a metric of recall, of the groups that have samples."""
    return f"({served(name)} and {served('recall_samples')} > 0)"


def latency(quantile: float) -> str:
    """Returns the query of a quantile of the latency of HTTP requests, in milliseconds."""
    buckets = "sum by (le, application) (rate(ray_serve_http_request_latency_ms_bucket[5m]))"
    return f"histogram_quantile({quantile}, {buckets})"


def rate_of(counter: str) -> str:
    """Returns the query of the rate of a counter of jobs, by stage."""
    return f"sum by ({STAGE}) (rate(ray_riptide_{counter}_total{{{CHOSEN}}}[1m]))"


ALERTS = (
    Alert(
        "JobStalled",
        f'max by ({STAGE}) (ray_riptide_running{{stage!~"fit|train .+|measure recall"}}) > 0'
        f" unless on ({STAGE}) sum by ({STAGE}) (increase(ray_riptide_rows_total[15m])) > 0",
        "15m",
        "critical",
        "{{ $labels.job_name }}: {{ $labels.stage }} of {{ $labels.store }} {{ $labels.artifact }} makes no progress",
        "No part of the job {{ $labels.submission }} was committed for 30 minutes. Look at the job's last lines, and "
        "whether nodes are pending. Stages of one unit, such as the training of an index, are left out.",
    ),
    Alert(
        "NodesPending",
        "sum by (NodeType) (autoscaler_pending_nodes) > 0",
        "15m",
        "warning",
        "{{ $value }} nodes of type {{ $labels.NodeType }} do not start",
        "Look at `ray status`: quota, capacity of the zone, spot price, image, permissions of the head.",
    ),
    Alert(
        "DiskNearlyFull",
        "max by (ip) (ray_node_disk_utilization_percentage) > 90",
        "5m",
        "critical",
        "The disk of node {{ $labels.ip }} is {{ $value | humanize }} % full",
        "Reduce RIPTIDE_CACHE_BYTES, or give the nodes a larger disk: a full one fails its parts.",
    ),
    Alert(
        "PartsFail",
        f'sum by (Name) (increase(ray_tasks{{State="FAILED", {PARTS}}}[15m])) > 5'
        " and on () max(ray_riptide_running) > 0",  # the pending tasks of an interrupted job fail, too
        "0m",
        "warning",
        "{{ $value | humanize }} tasks {{ $labels.Name }} failed within 15 minutes",
        "Workers are killed, for example because memory runs out or nodes leave. A task is tried six times, then the "
        "job ends; committed parts are kept.",
    ),
    Alert(
        "ServeErrors",
        f"{ERRORS} > 0.01",
        "5m",
        "critical",
        "{{ $value | humanizePercentage }} of the requests of {{ $labels.application }} fail",
        "More than 1 % of the answers have a status from 500 to 599: look at /readyz and at the logs of the replicas.",
    ),
    Alert(
        "ServeSlow",
        f"{latency(0.99)} > 1000",
        "10m",
        "warning",
        "The p99 latency of {{ $labels.application }} is {{ $value | humanize }} ms",
        "The p99 latency exceeds 1 s: add replicas, or reduce nprobe, the depth of re-ranking, or the load.",
    ),
    Alert(
        "ServeQueueGrows",
        f"{QUEUED} > 100",
        "5m",
        "warning",
        "{{ $value }} requests of {{ $labels.application }} wait for {{ $labels.deployment }}",
        "The replicas are saturated: raise max_replicas or the number of nodes.",
    ),
    Alert(
        "RecallLow",
        f'max by ({RECALL}) ({{__name__=~"(ray_)?riptide_recall_below_target"}}) > 0',
        "5m",
        "warning",
        "The index finds too few hits for task {{ $labels.task }} of {{ $labels.store }} ({{ $labels.mode }}, "
        "k {{ $labels.k }}, filter {{ $labels.filter }})",
        "The 95% interval of the recall is below --certify-recall, and nprobe is not raised further (--certify-raise): "
        "build the index for real queries (build-index --queries), or with a higher --recall.",
    ),
    Alert(
        "EncoderDrift",
        'min by (store, embeddings) ({__name__=~"(ray_)?riptide_stored_similarity"}) < 0.999',
        "5m",
        "warning",
        "The encoder of {{ $labels.embeddings }} of {{ $labels.store }} gives other vectors than those stored "
        "(similarity {{ $value }})",
        "A replica has other versions of libraries, or another kind of machine, than those that encoded the corpus: "
        "install those versions, or encode the corpus under another name. Below 0.99 a replica does not start.",
    ),
)

ROWS = {
    "Jobs": (
        Panel("Rows per second", "short", ((rate_of("rows"), STAGE_LEGEND),)),
        Panel(
            "Committed parts",
            "short",
            ((f"sum by ({STAGE}, outcome) (ray_riptide_parts_total{{{CHOSEN}}})", f"{STAGE_LEGEND} {{{{outcome}}}}"),),
        ),
        Panel("Tokens per second (encoding)", "short", ((rate_of("tokens"), STAGE_LEGEND),)),
        Panel("Pairs per second (re-ranking, training)", "short", ((rate_of("pairs"), STAGE_LEGEND),)),
        Panel("Running stages", "short", ((f"sum by ({STAGE}) (ray_riptide_running{{{CHOSEN}}})", STAGE_LEGEND),)),
        Panel(
            "Workers that wait for a node",
            "short",
            ((f"sum by ({JOB}) (ray_riptide_waiting_workers{{{CHOSEN}}})", "{{store}} {{job_name}}"),),
        ),
        Panel(
            "Time by phase, of all workers and the driver",
            "s",
            (
                (
                    f"sum by ({JOB}, phase) (rate(ray_riptide_phase_seconds_total{{{CHOSEN}}}[1m]))",
                    "{{store}} {{job_name}} {{phase}}",
                ),
            ),
        ),
    ),
    "Training": (
        Panel("Loss", "short", ((f"max by ({STAGE}) (ray_riptide_train_loss{{{CHOSEN}}})", ARTIFACT_LEGEND),)),
        Panel(
            "Learning rate",
            "sci",
            ((f"max by ({STAGE}) (ray_riptide_train_lr{{{CHOSEN}}})", ARTIFACT_LEGEND),),
        ),
        Panel("Steps", "short", ((f"max by ({STAGE}) (ray_riptide_train_steps{{{CHOSEN}}})", ARTIFACT_LEGEND),)),
    ),
    "Cluster": (
        Panel(
            "Nodes",
            "short",
            (
                ("sum(autoscaler_active_nodes)", "active"),
                ("sum(autoscaler_pending_nodes)", "pending"),
            ),
        ),
        Panel("CPU utilisation", "percent", (("max by (ip) (ray_node_cpu_utilization)", "{{ip}}"),)),
        Panel(
            "Memory in use",
            "percentunit",
            (("max by (ip) (ray_node_mem_used) / max by (ip) (ray_node_mem_total)", "{{ip}}"),),
        ),
        Panel("Disk in use", "percent", (("max by (ip) (ray_node_disk_utilization_percentage)", "{{ip}}"),)),
        Panel(
            "Failed tasks (each attempt)",
            "short",
            ((f'sum by (Name) (ray_tasks{{State="FAILED", {PARTS}}})', "{{Name}}"),),
        ),
    ),
    "Ray Serve": (
        Panel(
            "Requests per second",
            "reqps",
            (
                (
                    "sum by (application, status_code) (rate(ray_serve_num_http_requests_total[1m]))",
                    "{{application}} {{status_code}}",
                ),
            ),
        ),
        Panel("Errors", "percentunit", ((ERRORS, "{{application}}"),)),
        Panel(
            "Latency",
            "ms",
            ((latency(0.5), "{{application}} p50"), (latency(0.99), "{{application}} p99")),
        ),
        Panel(
            "Requests that wait, at Ray Serve and in the queues of replicas",
            "short",
            ((QUEUED, "{{application}} {{deployment}}"),),
        ),
    ),
    "Certified search": (
        Panel(
            "Recall of searches in an index, over the samples of all replicas",
            "percentunit",
            (
                (
                    f"sum by ({RECALL}) ({sampled('recall')} * {served('recall_samples')})"
                    f" / sum by ({RECALL}) ({served('recall_samples')})",
                    RECALL_LEGEND,
                ),
            ),
        ),
        # The recall of all replicas lies between the lowest and the highest recall of a replica, so the outermost ends
        # of their intervals contain it with a probability of at least 95%.
        Panel(
            "95% interval of this recall: outermost ends of the replicas",
            "percentunit",
            (
                (f"min by ({RECALL}) {sampled('recall_lower')}", f"{RECALL_LEGEND} lower"),
                (f"max by ({RECALL}) {sampled('recall_upper')}", f"{RECALL_LEGEND} upper"),
            ),
        ),
        Panel(
            "Sampled searches per second",
            "short",
            ((f"sum by (store, outcome) (rate({served('sampled_queries')}[5m]))", "{{store}} {{outcome}}"),),
        ),
        Panel(
            "nprobe or ef_search that --certify-raise has raised: maximum of the replicas",
            "short",
            ((f"max by ({RAISED}) ({served('raised_setting')})", RAISED_LEGEND),),
        ),
    ),
}

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 8, 8  # of a panel; the grid of Grafana is 24 wide


# kube-prometheus-stack, installed as the Helm release `prometheus`, reads monitors and rules with this label.
RELEASE = {"release": "prometheus"}
# Ports of Ray's pods that have metrics: of each node's agent, and of the autoscaler in the pod of the head.
METRICS_PORTS = ("metrics", "as-metrics")
KUBERNETES_HEAD = """\
# Written by generate.py: what the prometheus-operator scrapes, its alerts, and the dashboard for Grafana's sidecar.
#
#   kubectl apply -n NAMESPACE_OF_THE_CLUSTERS -f cluster/monitoring/kubernetes.yaml
"""


def alerts() -> str:
    """Returns the text of alerts.yaml."""
    return "# Written by generate.py.\n" + yaml.safe_dump(groups(), sort_keys=False, width=120)


def groups() -> dict[str, Any]:
    """Returns the alerts as Prometheus reads them."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": alert.wait,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "description": alert.description},
        }
        for alert in ALERTS
    ]
    return {"groups": [{"name": "riptide", "rules": rules}]}


def kubernetes() -> str:
    """Returns the text of kubernetes.yaml: a PodMonitor, a PrometheusRule and the ConfigMap of the dashboard."""
    cluster_label = "__meta_kubernetes_pod_label_ray_io_cluster"
    monitor = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": "riptide", "labels": RELEASE},
        "spec": {
            "selector": {"matchLabels": {"ray.io/is-ray-node": "yes"}},
            "podMetricsEndpoints": [
                {
                    "port": port,
                    "interval": "10s",
                    "relabelings": [{"sourceLabels": [cluster_label], "targetLabel": "ray_cluster"}],
                }
                for port in METRICS_PORTS
            ],
        },
    }
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "riptide", "labels": RELEASE},
        "spec": groups(),
    }
    text = json.dumps(json.loads(dashboard()), separators=(",", ":"))
    panels = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "riptide-dashboard", "labels": {"grafana_dashboard": "1"}},
        "data": {"riptide.json": text},
    }
    documents = (yaml.safe_dump(each, sort_keys=False, width=120) for each in (monitor, rule, panels))
    return KUBERNETES_HEAD + "---\n".join(documents)


def dashboard() -> str:
    """Returns the text of dashboard.json."""
    ids = itertools.count(1)
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append({"id": next(ids), "type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})
        y += 1
        for number, panel in enumerate(row):
            x, below = WIDTH * (number % 3), HEIGHT * (number // 3)
            panels.append(describe(panel, next(ids), {"x": x, "y": y + below, "w": WIDTH, "h": HEIGHT}))
        y += HEIGHT * -(-len(row) // 3)
    datasource = {"name": "datasource", "type": "datasource", "query": "prometheus", "hide": 2}
    document = {
        "uid": "riptide",
        "title": "riptide",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [datasource, *map(choice_of, ("store", "submission"))]},
        "panels": panels,
    }
    return json.dumps(document, indent=2) + "\n"


def choice_of(label: str) -> dict[str, Any]:
    """Returns a variable of the dashboard, by which its user chooses values of a label of jobs and servers."""
    return {
        "name": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": f"label_values({CHOICES}, {label})", "refId": label},
        "refresh": 2,  # when the time range changes
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def describe(panel: Panel, number: int, position: dict[str, int]) -> dict[str, Any]:
    """Returns a panel as Grafana reads it."""
    targets = [
        {"refId": chr(ord("A") + n), "expr": expr, "legendFormat": legend, "datasource": DATASOURCE}
        for n, (expr, legend) in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "datasource": DATASOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


if __name__ == "__main__":
    for name, write in (("alerts.yaml", alerts), ("dashboard.json", dashboard), ("kubernetes.yaml", kubernetes)):
        (HERE / name).write_text(write(), encoding="utf-8")
