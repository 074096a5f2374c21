"""The files of cluster/, read by Ray's own validation, a simulated EC2, Ray's KubeRay autoscaler and a schema.

What stays unproven here: a start on the real AWS, a real KubeRay operator, and the build of the image.
"""

import copy
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import boto3
import jsonschema
import pytest
import yaml
from moto import mock_aws
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
REGION = "us-west-2"
DELETED = object()


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((CLUSTER / name).read_text())


def changed(config: dict[str, Any], path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    """A copy of `config` with one place set to `value`, or deleted."""
    config = copy.deepcopy(config)  # a place that YAML anchors share changes for all that share it
    place: Any = config
    for key in path[:-1]:
        place = place[key]
    if value is DELETED:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return config


def constraints() -> dict[str, str]:
    """Package -> version of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


# aws.yaml


def validate_aws(config: dict[str, Any]) -> None:
    """What `ray up` does first: fill in Ray's defaults, then its schema and its checks."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(copy.deepcopy(config)))


def test_ray_accepts_aws_yaml() -> None:
    validate_aws(load("aws.yaml"))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("max_worker",), 3),
        (("max_workers",), "16"),
        (("idle_timeout_minutes",), -1),
        (("auth", "user"), "ubuntu"),
        (("head_node_type",), "header"),
        (("available_node_types", "gpu", "resources"), DELETED),
        (("available_node_types", "gpu", "min_worker"), 0),
        (("available_node_types", "gpu", "resources"), {"GPU": "one"}),
        (("available_node_types", "gpu", "min_workers"), 17),
        (("setup_commands", 0), ["apt-get", "update"]),
        (("rsync_excludes",), []),
    ],
)
def test_ray_refuses_a_broken_aws_yaml(path: tuple[str | int, ...], value: object) -> None:
    with pytest.raises((jsonschema.ValidationError, ValueError)):
        validate_aws(changed(load("aws.yaml"), path, value))


@pytest.fixture(scope="module")
def ec2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A simulated EC2 with the two instance profiles of aws.yaml; no key and no home of this machine is touched."""
    with pytest.MonkeyPatch.context() as patch, mock_aws():
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "simulated")
        for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL"):
            patch.delenv(name, raising=False)
        for name in ("riptide-head", "riptide-worker"):
            boto3.client("iam", region_name=REGION).create_instance_profile(InstanceProfileName=name)
        yield boto3.client("ec2", region_name=REGION)


def bootstrap(config: dict[str, Any]) -> dict[str, Any]:
    """What `ray up` does next: resources of the instance types, key pair, subnets, security group."""
    from ray.autoscaler._private.commands import _bootstrap_config

    return _bootstrap_config(copy.deepcopy(config), no_config_cache=True)


def launch(config: dict[str, Any], node_type: str) -> None:
    """One node of a type, by Ray's own EC2 provider."""
    from ray.autoscaler._private.providers import _get_node_provider

    provider = _get_node_provider(config["provider"], config["cluster_name"], use_cache=False)
    provider.create_node(config["available_node_types"][node_type]["node_config"], {"riptide-type": node_type}, 1)


@pytest.mark.slow
def test_ray_launches_every_node_type(ec2: Any) -> None:
    config = bootstrap(load("aws.yaml"))
    resources = {name: node_type["resources"] for name, node_type in config["available_node_types"].items()}
    assert {name: (found["CPU"], found.get("GPU", 0)) for name, found in resources.items()} == {
        "head": (0, 0),
        "cpu": (16, 0),
        "gpu": (8, 1),
        "gpu-a100": (96, 8),
    }
    for node_type in resources:
        launch(config, node_type)
    reservations = ec2.describe_instances()["Reservations"]
    launched = {
        tag["Value"]: (instance["InstanceType"], instance["IamInstanceProfile"]["Arn"].partition("/")[2])
        for reservation in reservations
        for instance in reservation["Instances"]
        for tag in instance["Tags"]
        if tag["Key"] == "riptide-type"
    }
    assert launched == {
        "head": ("m7i.2xlarge", "riptide-head"),
        "cpu": ("m7i.4xlarge", "riptide-worker"),
        "gpu": ("g6e.2xlarge", "riptide-worker"),
        "gpu-a100": ("p4d.24xlarge", "riptide-worker"),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("IamInstanceProfile", {"Name": "riptide"}),
        ("IamProfile", {"Name": "riptide-worker"}),
        ("MetadataOptions", {"HttpToken": "required"}),
        ("BlockDeviceMappings", [{"DeviceName": "/dev/sda1", "Ebs": {"Size": 300}}]),
    ],
)
def test_a_broken_node_config_does_not_launch(ec2: Any, field: str, value: object) -> None:
    import botocore.exceptions
    from ray.autoscaler.node_launch_exception import NodeLaunchException

    path = ("available_node_types", "gpu", "node_config", field)
    with pytest.raises((NodeLaunchException, botocore.exceptions.BotoCoreError, ValueError)):
        launch(bootstrap(changed(load("aws.yaml"), path, value)), "gpu")


@pytest.mark.slow
def test_an_unknown_instance_type_shows(ec2: Any) -> None:
    """Ray only warns of one and finds no resources, which test_ray_launches_every_node_type would not accept."""
    path = ("available_node_types", "gpu", "node_config", "InstanceType")
    config = bootstrap(changed(load("aws.yaml"), path, "g6e.3xlarge"))
    assert config["available_node_types"]["gpu"]["resources"] == {}


def ray_start_arguments(command: str) -> list[str]:
    return shlex.split(command.partition("ray start ")[2])


@pytest.mark.parametrize("kind", ["head", "worker"])
def test_every_node_starts_with_the_token(kind: str) -> None:
    """The start commands are shell, their options are those of `ray start`, and authentication is on."""
    from ray.scripts.scripts import start

    config = load("aws.yaml")
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    stop, command = config[f"{kind}_start_ray_commands"]
    assert stop == "ray stop"
    assert command.index("RAY_AUTH_MODE=token") < command.index("ray start")
    assert 'RAY_AUTH_TOKEN_PATH="$HOME/.ray/auth_token"' in command
    parsed = start.make_context("ray start", ray_start_arguments(command)).params
    assert parsed["head"] == (kind == "head")
    if kind == "head":
        assert parsed["dashboard_host"] == "127.0.0.1"
        assert parsed["autoscaling_config"] == "~/ray_bootstrap_config.yaml"
    else:
        assert parsed["address"] == "$RAY_HEAD_IP:6379"


def test_a_misspelt_start_option_is_found() -> None:
    import click
    from ray.scripts.scripts import start

    with pytest.raises(click.NoSuchOption):
        start.make_context("ray start", ["--head", "--dash-board-host=127.0.0.1"])


def test_commands_of_aws_yaml_are_shell() -> None:
    config = load("aws.yaml")
    for name in ("setup_commands", "head_start_ray_commands", "worker_start_ray_commands"):
        for command in config[name]:
            subprocess.run(["bash", "-n", "-c", command], check=True)


def installed_files() -> set[str]:
    """What `pip install .` reads, by pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    setuptools = project["tool"]["setuptools"]
    packages = {pattern.rstrip("*") for pattern in setuptools["packages"]["find"]["include"]}
    modules = {f"{module}.py" for module in setuptools["py-modules"]}
    metadata = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    return packages | modules | metadata | {"constraints.txt"}


def test_nodes_get_what_an_installation_needs() -> None:
    mounts = load("aws.yaml")["file_mounts"]
    local = {path for remote, path in mounts.items() if remote.startswith("~/riptide/")}
    assert local == installed_files()
    assert all(remote == f"~/riptide/{path}" for remote, path in mounts.items() if path in local)
    assert [path for path in sorted(local) if not (ROOT / path).exists()] == []


# rayjob.yaml

HEAD = ("spec", "rayClusterSpec", "headGroupSpec")
WORKER = ("spec", "rayClusterSpec", "workerGroupSpecs", 0)


def validate_rayjob(manifest: dict[str, Any]) -> None:
    schema = json.loads(Path(__file__).with_name("rayjob.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(manifest)


def autoscaling_config(manifest: dict[str, Any]) -> dict[str, Any]:
    """What Ray's autoscaler makes of the cluster that KubeRay would create for the job."""
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    metadata = {"name": "encode-corpus", "namespace": "default"}
    return _derive_autoscaling_config_from_ray_cr({"metadata": metadata, "spec": manifest["spec"]["rayClusterSpec"]})


def test_rayjob_has_fields_that_kuberay_knows() -> None:
    validate_rayjob(load("rayjob.yaml"))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("kind",), "RayJobs"),
        (("apiVersion",), "ray.io/v1alpha1"),
        (("metadata", "name"), DELETED),
        (("spec", "entrypoint"), DELETED),
        (("spec", "entryPoint"), "python x.py"),
        (("spec", "backoffLimit"), "2"),
        (("spec", "shutdownAfterJobFinishes"), "yes"),
        (("spec", "rayClusterSpec", "rayVersion"), 2.6),
        (("spec", "rayClusterSpec", "authOptions", "mode"), "tokens"),
        (("spec", "rayClusterSpec", "autoscalerOptions", "upscalingMode"), "Fast"),
        ((*HEAD, "rayStartParams", "num-cpus"), 0),
        ((*WORKER, "maxReplicas"), DELETED),
        ((*WORKER, "minReplica"), 0),
        ((*WORKER, "template", "spec", "serviceAccount"), "riptide"),
        ((*WORKER, "template", "spec", "containers", 0, "resources", "limits", "memory"), "48GiB"),
        ((*WORKER, "template", "spec", "containers", 0, "env", 1, "valueFrom", "secretKeyRef", "key"), DELETED),
        ((*WORKER, "template", "spec", "containers", 0, "env", 1, "value"), "key"),
    ],
)
def test_a_broken_rayjob_is_refused(path: tuple[str | int, ...], value: object) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validate_rayjob(changed(load("rayjob.yaml"), path, value))


def test_ray_reads_the_rayjobs_cluster() -> None:
    """Node types, limits and resources as Ray's KubeRay autoscaler sees them; the head takes no tasks."""
    found = autoscaling_config(load("rayjob.yaml"))
    types = found["available_node_types"]
    assert types["headgroup"]["resources"]["CPU"] == 0
    assert (types["gpu"]["min_workers"], types["gpu"]["max_workers"]) == (0, 8)
    assert types["gpu"]["resources"] == {"CPU": 7, "GPU": 1, "memory": 48 * 2**30}
    assert found["idle_timeout_minutes"] == 5


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((*WORKER, "maxReplicas"), DELETED),
        ((*WORKER, "template", "spec", "containers", 0, "resources"), {}),
        ((*WORKER, "template", "spec", "containers", 0, "resources", "limits", "cpu"), "seven"),
    ],
)
def test_ray_refuses_a_broken_cluster(path: tuple[str | int, ...], value: object) -> None:
    with pytest.raises((KeyError, ValueError)):
        autoscaling_config(changed(load("rayjob.yaml"), path, value))


def test_the_jobs_pool_fits_its_workers() -> None:
    """One encoder takes a whole worker, and as many run as there may be workers: the cluster starts with none."""
    manifest = load("rayjob.yaml")
    words = shlex.split(manifest["spec"]["entrypoint"])
    asked = {name: int(words[words.index(f"--{name}") + 1]) for name in ("gpus", "cpus", "max-workers")}
    worker = autoscaling_config(manifest)["available_node_types"]["gpu"]
    resources = worker["resources"]
    assert asked == {"gpus": resources["GPU"], "cpus": resources["CPU"], "max-workers": worker["max_workers"]}


def test_rayjob_turns_authentication_on_and_names_no_key() -> None:
    cluster = load("rayjob.yaml")["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        for variable in container["env"]:
            if "KEY" in variable["name"]:
                assert set(variable) == {"name", "valueFrom"}
        assert container["resources"]["requests"] == container["resources"]["limits"]


@pytest.mark.parametrize("path", sorted(path.name for path in CLUSTER.iterdir()))
def test_no_key_lies_about(path: str) -> None:
    assert re.findall(r"AKIA[0-9A-Z]{16}|-----BEGIN", (CLUSTER / path).read_text()) == []


# What the files say about the rest of the project


def image_root() -> str:
    """Where the image keeps the checkout."""
    (found,) = re.findall(r"^WORKDIR (\S+)$", (CLUSTER / "Dockerfile").read_text(), flags=re.MULTILINE)
    return found


PAGES = ("README.md", "docs/cluster.md", "cluster/README.md")


def submitted(page: str) -> list[str]:
    """Every `python jobs/x.py …` that a page submits to a cluster."""
    text = (ROOT / page).read_text().replace("\\\n", " ")
    return re.findall(r"ray job submit --working-dir \. -- +(python jobs/\w+\.py --[^\n`]+)", text)


def job_commands() -> list[str]:
    """Every job of rayjob.yaml and of the pages, with paths as in the checkout."""
    entrypoint = load("rayjob.yaml")["spec"]["entrypoint"].replace(f"{image_root()}/", "")
    return list(dict.fromkeys([entrypoint, *(command for page in PAGES for command in submitted(page))]))


@pytest.mark.parametrize("page", PAGES)
def test_what_pages_submit_has_what_it_needs(page: str) -> None:
    """A token, made before it is exported; a store that is found from another folder."""
    text = (ROOT / page).read_text()
    exports = "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=~/.ray/auth_token RAY_API_SERVER_ADDRESS=http://127.0.0.1:8265"
    places = [text.index(words) for words in ("ray get-auth-token --generate", exports, "ray job submit")]
    assert places == sorted(places)
    assert submitted(page)
    for command in submitted(page):
        if "--store" in command:
            assert re.search(r"--store (s3://|\$PWD/)", command), command


@pytest.mark.parametrize("command", job_commands())
def test_jobs_and_their_options_exist(command: str) -> None:
    python, job, *arguments = shlex.split(command)
    assert python == "python"
    assert (ROOT / job).is_file(), f"{job}: named in cluster/rayjob.yaml or a page, but not there"
    shown = subprocess.run([sys.executable, job, "--help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    known = set(re.findall(r"--[a-z][a-z0-9-]*", shown))
    assert {argument for argument in arguments if argument.startswith("--")} <= known


def test_versions_are_those_of_the_constraints() -> None:
    pinned = constraints()
    assert load("rayjob.yaml")["spec"]["rayClusterSpec"]["rayVersion"] == pinned["ray"]
    for path in ("cluster/Dockerfile", "Makefile"):
        text = (ROOT / path).read_text()
        found = dict(re.findall(r"\b(ray|torch|faiss-cpu|faiss-gpu)==([0-9.]+[0-9])", text))
        assert found == {"torch": pinned["torch"]}, path
        assert "-c constraints.txt" in text, path


def test_constraints_cover_what_the_project_asks_for() -> None:
    """Each requirement of pyproject.toml, extras included, has one exact version that it allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = constraints()
    for line in chain(project["dependencies"], *project["optional-dependencies"].values()):
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"constraints.txt has no {name}"
        assert requirement.specifier.contains(pinned[name]), f"{line}, but constraints.txt has {pinned[name]}"


def test_image_copies_what_exists() -> None:
    """The image holds all that an installation needs, owned by a plain user."""
    text = (CLUSTER / "Dockerfile").read_text()
    copied = {source for line in re.findall(r"^COPY (.+) \S+$", text, flags=re.MULTILINE) for source in line.split()}
    assert [path for path in sorted(copied) if not (ROOT / path).exists()] == []
    assert installed_files() <= copied
    assert re.findall(r"^USER (\S+)$", text, flags=re.MULTILINE) == ["ray"]


def test_serve_yaml_is_what_ray_serve_and_the_application_take() -> None:
    from ray.serve.schema import ServeDeploySchema

    from serve import deployments

    config = ServeDeploySchema.model_validate(load("serve.yaml"))
    [application] = config.applications
    module, _, name = application.import_path.partition(":")
    assert (module, getattr(deployments, name)) == ("serve.deployments", deployments.build)
    args = deployments.Application.model_validate(application.args)
    assert args.tokens
    assert not args.without_tokens
    for part in ("ingress", "encoder", "search", "words", "passages", "reranker"):
        scale: deployments.Scale = getattr(args, part)
        assert scale.options()["autoscaling_config"]["max_replicas"] >= scale.replicas
    with pytest.raises(ValueError, match="shard_count"):
        deployments.build({**application.args, "shard_count": 3})
