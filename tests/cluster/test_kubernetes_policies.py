"""policies.yaml and monitoring/kubernetes.yaml, by the schemas of Kubernetes and of the prometheus-operator.

What stays unproven here: a network plugin that enforces the policy, and an operator that reads the monitor.
"""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from cluster_files import CLUSTER, DELETED, KUBERAY, changed, cluster_of, load

MONITORING = CLUSTER / "monitoring"
SCHEMAS = json.loads((Path(__file__).parent / "kubernetes_schemas.json").read_text())
FILES = (CLUSTER / "policies.yaml", MONITORING / "kubernetes.yaml")


def validate(document: dict[str, Any]) -> None:
    schema = SCHEMAS[f"{document['apiVersion']} {document['kind']}"]
    jsonschema.Draft202012Validator(schema).validate(document)


DOCUMENTS = {
    f"{document['kind']} {document['metadata']['name']}": document
    for path in FILES
    for document in yaml.safe_load_all(path.read_text())
}
POLICY = DOCUMENTS["NetworkPolicy riptide"]["spec"]
MONITOR = DOCUMENTS["PodMonitor riptide"]["spec"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_api_knows_every_field(name: str) -> None:
    validate(DOCUMENTS[name])


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("NetworkPolicy riptide", ("spec", "podSelectors"), {}),
        ("NetworkPolicy riptide", ("spec", "ingress", 1, "ports", 0, "containerPort"), 8265),
        ("NetworkPolicy riptide", ("spec", "ingress", 1, "from", 0, "podSelector", "labels"), {}),
        ("PodDisruptionBudget riptide-search", ("spec", "minAvailable"), [1]),
        ("PodDisruptionBudget riptide-search", ("spec", "min_available"), 1),
        ("PodMonitor riptide", ("spec", "selector"), DELETED),
        ("PodMonitor riptide", ("spec", "podMetricsEndpoints", 0, "interval"), "ten seconds"),
        ("PodMonitor riptide", ("spec", "endpoints"), []),
        ("PrometheusRule riptide", ("spec", "groups", 0, "name"), DELETED),
        ("PrometheusRule riptide", ("spec", "groups", 0, "rules", 0, "wait"), "15m"),
        ("ConfigMap riptide-dashboard", ("data", "riptide.json"), {}),
    ],
)
def test_a_broken_document_is_refused(name: str, path: tuple[str | int, ...], value: object) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validate(changed(DOCUMENTS[name], path, value))


def test_kubernetes_has_the_alerts_and_the_dashboard_of_the_other_files() -> None:
    assert DOCUMENTS["PrometheusRule riptide"]["spec"] == yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    [text] = DOCUMENTS["ConfigMap riptide-dashboard"]["data"].values()
    assert json.loads(text) == json.loads((MONITORING / "dashboard.json").read_text())


def ports_of(group: dict[str, Any]) -> dict[str, int]:
    """Returns the ports of a group's pods by their names."""
    [container] = group["template"]["spec"]["containers"]
    return {port["name"]: port["containerPort"] for port in container["ports"]}


@pytest.mark.parametrize("name", KUBERAY)
def test_prometheus_finds_its_ports_and_may_reach_them(name: str) -> None:
    cluster = cluster_of(name)
    endpoints = [endpoint["port"] for endpoint in MONITOR["podMetricsEndpoints"]]
    assert endpoints == ["metrics", "as-metrics"]
    head = ports_of(cluster["headGroupSpec"])
    assert all(may_connect(pod({}), "monitoring", head[port]) for port in endpoints)
    for group in cluster["workerGroupSpecs"]:
        assert ports_of(group)["metrics"] == head["metrics"]


def pod(labels: dict[str, str]) -> dict[str, str]:
    """Returns the labels of a pod that is no node of Ray."""
    return {"app": "other", **labels}


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Returns whether a selector without operators other than Exists selects an object with these labels."""
    expressions = selector.get("matchExpressions", [])
    assert all(expression["operator"] == "Exists" for expression in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        expression["key"] in labels for expression in expressions
    )


def may_connect(labels: dict[str, str], namespace: str, port: int) -> bool:
    """Returns whether a pod of a namespace may connect to a port of a node of Ray in the namespace `ours`."""

    def matches(peer: dict[str, Any]) -> bool:
        if "namespaceSelector" not in peer:
            in_namespace = namespace == "ours"
        else:
            in_namespace = selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": namespace})
        return in_namespace and selects(peer.get("podSelector", {}), labels)

    return any(
        ("from" not in rule or any(map(matches, rule["from"])))
        and ("ports" not in rule or port in [each["port"] for each in rule["ports"]])
        for rule in POLICY["ingress"]
    )


RAY = {"ray.io/is-ray-node": "yes"}
OPERATOR = {"app.kubernetes.io/component": "kuberay-operator"}
SUBMITTER = {"batch.kubernetes.io/job-name": "encode-corpus"}


@pytest.mark.parametrize(
    ("labels", "namespace", "ports"),
    [
        (pod({}), "ours", {8000}),
        (pod({}), "elsewhere", {8000}),
        (RAY, "ours", {6379, 8000, 8080, 8265, 8404, 8500, 9101, 10001, 30000, 44217}),
        (RAY, "elsewhere", {8000}),
        (OPERATOR, "kuberay-system", {8000, 8265}),
        (SUBMITTER, "ours", {8000, 8265}),
        (SUBMITTER, "elsewhere", {8000}),
        (pod({}), "monitoring", {8000, 8080, 44217}),
    ],
)
def test_the_policy_opens_these_ports_and_no_others(labels: dict[str, str], namespace: str, ports: set[int]) -> None:
    every = {6379, 8000, 8080, 8265, 8404, 8500, 9101, 10001, 30000, 44217}
    assert {port for port in every if may_connect(labels, namespace, port)} == ports


def test_a_drain_leaves_a_replica_and_the_head_of_the_standing_cluster() -> None:
    search = DOCUMENTS["PodDisruptionBudget riptide-search"]["spec"]
    for group in cluster_of("rayservice.yaml")["workerGroupSpecs"]:
        labels = group["template"]["metadata"]["labels"]
        assert selects(search["selector"], {**labels, "ray.io/node-type": "worker"})
    assert search["minAvailable"] == load("serve.yaml")["applications"][0]["args"]["replicas"] - 1
    head = DOCUMENTS["PodDisruptionBudget riptide-head"]["spec"]["selector"]["matchLabels"]
    assert head == {"ray.io/cluster": load("raycluster.yaml")["metadata"]["name"], "ray.io/node-type": "head"}


@pytest.mark.parametrize("name", KUBERAY)
def test_images_are_named_by_digest(name: str) -> None:
    cluster = cluster_of(name)
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    images = {container["image"] for group in groups for container in group["template"]["spec"]["containers"]}
    assert len(images) == 1
    assert re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", images.pop())
