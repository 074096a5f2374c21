"""The files for KubeRay, read by the operator's own definitions, by Ray's autoscaler and by Ray Serve.

What stays unproven here: a start on a real operator, and the build of the image. The definitions lie next to the
checkout; without them their tests are skipped.
"""

import copy
import gzip
import shlex
from functools import cache
from typing import Any

import jsonschema
import pytest
import yaml
from cluster_files import DELETED, KUBERAY, ROOT, autoscaling_config, changed, cluster_of, launched, load

DEFINITIONS = ROOT.parent / "shared" / "kuberay"
HEAD = ("spec", "rayClusterSpec", "headGroupSpec")
WORKER = ("spec", "rayClusterSpec", "workerGroupSpecs", 0)


@cache
def schema_of(kind: str, version: str) -> dict[str, Any]:
    """The schema of one of KubeRay's resources, in which an unknown field is an error, as the API server has it."""
    if not DEFINITIONS.is_dir():
        pytest.skip(f"needs KubeRay's definitions in {DEFINITIONS}")
    text = gzip.decompress((DEFINITIONS / f"ray.io_{kind.lower()}s.yaml.gz").read_bytes())
    definition = yaml.load(text, yaml.CSafeLoader)  # much faster than safe_load on a megabyte
    group = definition["spec"]["group"]
    [schema] = [each["schema"] for each in definition["spec"]["versions"] if f"{group}/{each['name']}" == version]
    return strict(schema["openAPIV3Schema"])


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy of a schema in which objects with named fields have no others."""
    schema = {key: strict(value) if isinstance(value, dict) else value for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        schema.setdefault("additionalProperties", False)
    return schema


def validate(manifest: dict[str, Any]) -> None:
    jsonschema.Draft4Validator(schema_of(manifest["kind"], manifest["apiVersion"])).validate(manifest)


@pytest.mark.parametrize("name", KUBERAY)
def test_the_operator_knows_every_field(name: str) -> None:
    validate(load(name))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "entryPoint"), "python x.py"),
        (("spec", "backoffLimit"), "2"),
        (("spec", "shutdownAfterJobFinishes"), "yes"),
        (("spec", "rayClusterSpec", "rayVersion"), 2.6),
        (("spec", "rayClusterSpec", "authOptions", "mode"), "tokens"),
        (("spec", "rayClusterSpec", "autoscalerOptions", "version"), "v3"),
        (("spec", "rayClusterSpec", "gcsFaultToleranceOptions"), {"backend": "sqlite"}),
        ((*HEAD, "rayStartParams", "num-cpus"), 0),
        ((*WORKER, "maxReplicas"), DELETED),
        ((*WORKER, "minReplica"), 0),
        ((*WORKER, "template", "metadata", "annotation"), {}),
        ((*WORKER, "template", "spec", "serviceAccounts"), "riptide"),
        ((*WORKER, "template", "spec", "containers", 0, "resources", "limits", "memory"), "48GiB"),
        ((*WORKER, "template", "spec", "containers", 0, "env", 1, "valueFrom", "secretKeyRef", "key"), DELETED),
    ],
)
def test_a_broken_file_is_refused(path: tuple[str | int, ...], value: object) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validate(changed(load("rayjob.yaml"), path, value))


@pytest.mark.parametrize("name", KUBERAY)
def test_ray_reads_the_cluster(name: str) -> None:
    """Node types, limits, resources and labels as Ray's autoscaler sees them; the head takes no tasks."""
    config = autoscaling_config(cluster_of(name))
    types = config["available_node_types"]
    assert types.pop("headgroup")["resources"]["CPU"] == 0
    assert types["gpu"]["resources"] == {"CPU": 7, "GPU": 1, "memory": 48 * 2**30}
    assert {(kind["min_workers"], kind["max_workers"]) for kind in types.values()} == {(0, 8)}
    assert {group: kind["labels"] for group, kind in types.items()} == {group: {"node-type": group} for group in types}
    assert config["idle_timeout_minutes"] == 5
    assert cluster_of(name)["autoscalerOptions"]["version"] == "v2"


@pytest.mark.parametrize("name", KUBERAY)
def test_autoscalers_of_nodes_leave_every_pod_where_it_is(name: str) -> None:
    cluster = cluster_of(name)
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert group["template"]["metadata"]["annotations"] == {
            "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
            "karpenter.sh/do-not-disrupt": "true",
        }


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("workerGroupSpecs", 0, "maxReplicas"), DELETED),
        (("workerGroupSpecs", 0, "template", "spec", "containers", 0, "resources"), {}),
        (("workerGroupSpecs", 0, "template", "spec", "containers", 0, "resources", "limits", "cpu"), "seven"),
        (("workerGroupSpecs", 0, "labels"), {"node-type": "one gpu"}),
    ],
)
def test_ray_refuses_a_broken_cluster(path: tuple[str | int, ...], value: object) -> None:
    with pytest.raises((KeyError, ValueError)):
        autoscaling_config(changed(cluster_of("rayjob.yaml"), path, value))


@pytest.mark.parametrize(
    ("resources", "label", "nodes"),
    [
        ({"CPU": 7, "GPU": 1}, None, {"gpu": 8}),
        ({"CPU": 1}, None, {"cpu": 2}),
        ({"CPU": 1}, "gpu", {"gpu": 3}),
        ({"CPU": 7, "GPU": 1}, "cpu", {}),
    ],
)
def test_work_starts_the_nodes_that_its_label_names(
    resources: dict[str, float], label: str | None, nodes: dict[str, int]
) -> None:
    config = autoscaling_config(cluster_of("raycluster.yaml"))
    assert launched(config, resources, 20, {"node-type": label} if label else {}) == nodes


def test_one_encoder_takes_a_whole_worker() -> None:
    words = shlex.split(load("rayjob.yaml")["spec"]["entrypoint"])
    options = {name: int(words[words.index(f"--{name}") + 1]) for name in ("gpus", "cpus")}
    resources = autoscaling_config(cluster_of("rayjob.yaml"))["available_node_types"]["gpu"]["resources"]
    assert options == {"gpus": resources["GPU"], "cpus": resources["CPU"]}


def groups_of(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


@pytest.mark.parametrize("name", KUBERAY)
def test_authentication_is_on_and_no_key_is_named(name: str) -> None:
    cluster = cluster_of(name)
    assert cluster["authOptions"] == {"mode": "token"}
    for group in groups_of(cluster):
        (container,) = group["template"]["spec"]["containers"]
        for variable in container["env"]:
            if "KEY" in variable["name"]:
                assert set(variable) == {"name", "valueFrom"}
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert container["resources"]["limits"]["ephemeral-storage"] in ("80Gi", "200Gi")


@pytest.mark.parametrize("name", KUBERAY)
def test_a_pod_has_time_to_drain(name: str) -> None:
    """Longer than the default of 30 s, and as long as the notice of a spot instance on AWS at most."""
    for group in groups_of(cluster_of(name)):
        pod = group["template"]["spec"]
        [drain_s] = [
            float(variable["value"])
            for variable in pod["containers"][0]["env"]
            if variable["name"] == "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
        ]
        assert 30 < drain_s < pod["terminationGracePeriodSeconds"] <= 120


def without_serving(cluster: dict[str, Any]) -> dict[str, Any]:
    """A cluster's specification less what only a service or only a standing cluster needs."""
    cluster = copy.deepcopy(cluster)
    assert cluster.pop("gcsFaultToleranceOptions") == {"backend": "rocksdb", "storage": {"size": "1Gi"}}
    for group in groups_of(cluster):
        group["template"].pop("metadata", None)
        group["template"]["spec"].pop("volumes", None)
        (container,) = group["template"]["spec"]["containers"]
        container.pop("volumeMounts", None)
        container["ports"] = [port for port in container.get("ports", []) if port["name"] != "serve"]
    return cluster


def test_the_clusters_are_the_same() -> None:
    """A change of a node is made in all three files."""
    job, standing, service = map(cluster_of, ("rayjob.yaml", "raycluster.yaml", "rayservice.yaml"))
    assert without_serving(standing) == without_serving(service)
    del standing["gcsFaultToleranceOptions"]
    standing["workerGroupSpecs"] = [group for group in standing["workerGroupSpecs"] if group["groupName"] == "gpu"]
    assert standing == job


def test_the_service_is_that_of_serve_yaml() -> None:
    assert yaml.safe_load(load("rayservice.yaml")["spec"]["serveConfigV2"]) == load("serve.yaml")


def test_the_services_pods_have_the_file_of_tokens() -> None:
    tokens = load("serve.yaml")["applications"][0]["args"]["tokens"]
    for group in groups_of(cluster_of("rayservice.yaml")):
        pod = group["template"]["spec"]
        [mount], [volume] = pod["containers"][0]["volumeMounts"], pod["volumes"]
        assert (mount["name"], f"{mount['mountPath']}/tokens.json") == (volume["name"], tokens)


def test_the_service_finds_room_for_its_deployments() -> None:
    """At its smallest, every replica has a node on a cluster that starts empty."""
    config = autoscaling_config(cluster_of("rayservice.yaml"))
    args = load("serve.yaml")["applications"][0]["args"]
    leaves = 4 * args.get("leaf_replicas", 2)  # as the comment in serve.yaml has them
    tasks = [
        ({"CPU": args["cpus"], "GPU": args["gpus"]}, args["replicas"]),
        ({"CPU": args.get("leaf_cpus", 4)}, leaves),
    ]
    for task, replicas in tasks:
        assert launched(config, task, replicas, {}), task
    cpus, gpus = (sum(task.get(name, 0) * replicas for task, replicas in tasks) for name in ("CPU", "GPU"))
    types = config["available_node_types"]
    assert cpus <= sum(kind["resources"]["CPU"] * kind["max_workers"] for kind in types.values())
    assert gpus <= sum(kind["resources"].get("GPU", 0) * kind["max_workers"] for kind in types.values())
