"""What the tests of cluster/ share: its files as data, and the nodes that Ray's autoscaler starts by them."""

import copy
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "cluster"
# The path of the RayCluster's specification in each file for KubeRay.
KUBERAY = {
    "rayjob.yaml": ("spec", "rayClusterSpec"),
    "raycluster.yaml": ("spec",),
    "rayservice.yaml": ("spec", "rayClusterConfig"),
}
# The resources of the workers' instance types, as EC2 tells Ray.
AWS_RESOURCES: dict[str, dict[str, float]] = {
    "cpu-spot": {"CPU": 16},
    "cpu-spot-r7i": {"CPU": 16},
    "cpu": {"CPU": 16},
    "gpu-spot": {"CPU": 8, "GPU": 1},
    "gpu": {"CPU": 8, "GPU": 1},
    "gpu-a100": {"CPU": 96, "GPU": 8},
}
DELETED = object()


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((CLUSTER / name).read_text())


def changed(config: dict[str, Any], path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    """Returns a copy of `config` with one place set to `value`, or deleted."""
    config = copy.deepcopy(config)  # a place that YAML anchors share changes for all that share it
    place: Any = config
    for key in path[:-1]:
        place = place[key]
    if value is DELETED:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return config


def cluster_of(name: str) -> dict[str, Any]:
    """Returns the RayCluster's specification in a file for KubeRay."""
    place = load(name)
    for key in KUBERAY[name]:
        place = place[key]
    return place


def autoscaling_config(cluster: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration that Ray's autoscaler derives from a RayCluster's specification."""
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    metadata = {"name": "riptide", "namespace": "default"}
    return _derive_autoscaling_config_from_ray_cr({"metadata": metadata, "spec": cluster})


def launched(
    config: dict[str, Any],
    resources: dict[str, float],
    count: int,
    labels: dict[str, str],
    failed: Collection[str] = (),
) -> dict[str, int]:
    """Returns the nodes of each type that Ray's autoscaler v2 starts for `count` pending tasks on an empty cluster.

    Launches of the types in `failed` have just failed.
    """
    from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
    from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
    from ray.autoscaler.v2.utils import ResourceRequestUtil
    from ray.core.generated.common_pb2 import LabelSelectorOperator

    settings = AutoscalingConfig(copy.deepcopy(config), skip_content_hash=True)
    equal = LabelSelectorOperator.LABEL_OPERATOR_IN
    selector = [(key, equal, [value]) for key, value in labels.items()]
    task = ResourceRequestUtil.make(resources, label_selectors=[selector] if selector else None)
    request = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=settings.get_node_type_configs(),
        max_num_nodes=settings.get_max_num_worker_nodes(),
        resource_requests=ResourceRequestUtil.group_by_count([task] * count),
        cloud_resource_availabilities=dict.fromkeys(failed, 0.0),
        recoverable_resource_availabilities=dict.fromkeys(failed, 0.0),
    )
    return {launch.instance_type: launch.count for launch in ResourceDemandScheduler().schedule(request).to_launch}
