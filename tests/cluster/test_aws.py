"""aws.yaml and aws-roles.yaml, read by Ray's own validation and launched against a simulated EC2.

What stays unproven here: a start on the real AWS.
"""

import copy
import fnmatch
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import jsonschema
import pytest
from cluster_files import AWS_RESOURCES, CLUSTER, DELETED, changed, launched, load
from moto import mock_aws

REGION = "us-west-2"


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


IMAGE = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
BUCKET = "my-bucket"


@pytest.fixture(scope="module")
def ec2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A simulated EC2 with the stack of aws-roles.yaml; no key and no home of this machine is touched."""
    with pytest.MonkeyPatch.context() as patch, mock_aws():
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("AWS_DEFAULT_REGION", REGION)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "simulated")
        for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL"):
            patch.delenv(name, raising=False)
        boto3.client("cloudformation").create_stack(
            StackName="riptide-roles",
            TemplateBody=(CLUSTER / "aws-roles.yaml").read_text(),
            Parameters=[{"ParameterKey": "Bucket", "ParameterValue": BUCKET}],
            Capabilities=["CAPABILITY_NAMED_IAM"],
        )
        yield boto3.client("ec2")


def bootstrap(config: dict[str, Any]) -> dict[str, Any]:
    """What `ray up` does next: resources of the instance types, key pair, subnets, security group."""
    from ray.autoscaler._private.commands import _bootstrap_config

    return _bootstrap_config(copy.deepcopy(config), no_config_cache=True)


@pytest.fixture(scope="module")
def bootstrapped(ec2: Any) -> dict[str, Any]:
    return bootstrap(load("aws.yaml"))


def launch(config: dict[str, Any], node_type: str) -> None:
    """One node of a type, by Ray's own EC2 provider."""
    from ray.autoscaler._private.providers import _get_node_provider

    provider = _get_node_provider(config["provider"], config["cluster_name"], use_cache=False)
    provider.create_node(config["available_node_types"][node_type]["node_config"], {"riptide-type": node_type}, 1)


@pytest.mark.slow
def test_ray_launches_every_node_type(ec2: Any, bootstrapped: dict[str, Any]) -> None:
    config = bootstrapped
    resources = {name: node_type["resources"] for name, node_type in config["available_node_types"].items()}
    sizes = {name: {key: found[key] for key in ("CPU", "GPU") if key in found} for name, found in resources.items()}
    assert sizes == {"head": {"CPU": 0}, **AWS_RESOURCES}
    for node_type in resources:
        launch(config, node_type)
    reservations = ec2.describe_instances()["Reservations"]
    instances = {
        tag["Value"]: (instance["InstanceType"], instance["IamInstanceProfile"]["Arn"].partition("/")[2])
        for reservation in reservations
        for instance in reservation["Instances"]
        for tag in instance["Tags"]
        if tag["Key"] == "riptide-type"
    }
    assert instances == {
        "head": ("m7i.2xlarge", "riptide-head"),
        "cpu-spot": ("m7i.4xlarge", "riptide-worker"),
        "cpu-spot-r7i": ("r7i.4xlarge", "riptide-worker"),
        "cpu": ("m7i.4xlarge", "riptide-worker"),
        "gpu-spot": ("g6e.2xlarge", "riptide-worker"),
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


def test_the_roles_template_has_no_mistake() -> None:
    from cfnlint.api import lint_all

    matches = lint_all((CLUSTER / "aws-roles.yaml").read_text())
    assert [match for match in matches if match.rule.severity != "informational"] == []


def statements(role: str) -> list[tuple[str, str, dict[str, Any]]]:
    """(action, resource, condition) of everything that a role may do."""
    iam, entries = boto3.client("iam"), []
    for policy in iam.list_attached_role_policies(RoleName=role)["AttachedPolicies"]:
        version = iam.get_policy(PolicyArn=policy["PolicyArn"])["Policy"]["DefaultVersionId"]
        document = iam.get_policy_version(PolicyArn=policy["PolicyArn"], VersionId=version)["PolicyVersion"]["Document"]
        entries += [
            (action, resource, statement.get("Condition", {}))
            for statement in document["Statement"]
            for action in as_list(statement["Action"])
            for resource in as_list(statement["Resource"])
        ]
    return entries


def as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


@pytest.mark.slow
def test_roles_have_the_least_rights(ec2: Any) -> None:
    """Both use the bucket and no other; the head starts workers of this cluster and passes no role but theirs."""
    worker, head = statements("riptide-worker"), statements("riptide-head")
    assert {resource for _, resource, _ in worker} == {f"arn:aws:s3:::{BUCKET}", f"arn:aws:s3:::{BUCKET}/*"}
    assert {action.partition(":")[0] for action, _, _ in worker} == {"s3"}
    head_only = [statement for statement in head if statement not in worker]
    assert len(head_only) == len(head) - len(worker)
    [(passed, condition)] = [
        (resource, condition) for action, resource, condition in head_only if action == "iam:PassRole"
    ]
    assert passed == boto3.client("iam").get_role(RoleName="riptide-worker")["Role"]["Arn"]
    assert condition == {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}
    cluster = load("aws.yaml")["cluster_name"]
    tagged = [condition["StringEquals"] for action, _, condition in head_only if action == "ec2:TerminateInstances"]
    assert tagged == [{"aws:ResourceTag/ray-cluster-name": cluster}]
    instances = [
        condition
        for action, resource, condition in head_only
        if action == "ec2:RunInstances" and ":instance/" in resource
    ]
    assert instances == [{"StringEquals": {"aws:RequestTag/ray-cluster-name": cluster}}]
    assert not any("*" in action for action, _, _ in head)
    [image] = [resource for action, resource, _ in head_only if action == "ssm:GetParameters"]
    assert fnmatch.fnmatch(f"arn:aws:ssm:{REGION}::parameter{IMAGE}", image)


@pytest.mark.slow
def test_the_heads_role_has_what_rays_autoscaler_calls(bootstrapped: dict[str, Any]) -> None:
    """The calls of a worker's life, from its start to its end, are the actions on EC2 that the role has."""
    from ray.autoscaler._private.providers import _get_node_provider

    provider = _get_node_provider(bootstrapped["provider"], bootstrapped["cluster_name"], use_cache=False)
    calls = set()
    for resource in (provider.ec2, provider.ec2_fail_fast):
        resource.meta.client.meta.events.register("before-call", lambda model, **_: calls.add(f"ec2:{model.name}"))
    [node] = provider.create_node(bootstrapped["available_node_types"]["cpu"]["node_config"], {"riptide-type": "x"}, 1)
    assert node in provider.non_terminated_nodes({})
    provider.set_node_tags(node, {"ray-node-status": "up-to-date"})
    provider.terminate_node(node)
    assert calls == {action for action, _, _ in statements("riptide-head") if action.startswith("ec2:")}


@pytest.mark.slow
def test_ray_leaves_the_image_to_ec2(bootstrapped: dict[str, Any]) -> None:
    types = bootstrapped["available_node_types"].values()
    assert {node_type["node_config"]["ImageId"] for node_type in types} == {f"resolve:ssm:{IMAGE}"}


SPOT = ("cpu-spot", "gpu-spot")


@pytest.mark.parametrize(
    ("resources", "count", "label", "failed", "nodes"),
    [
        ({"CPU": 7, "GPU": 1}, 4, None, (), {"gpu-spot": 4}),
        ({"CPU": 7, "GPU": 1}, 12, None, (), {"gpu-spot": 8, "gpu": 4}),
        ({"CPU": 7, "GPU": 1}, 4, None, SPOT, {"gpu": 4}),
        ({"CPU": 16}, 3, None, (), {"cpu-spot": 3}),
        ({"CPU": 16}, 3, None, SPOT, {"cpu-spot-r7i": 3}),
        ({"CPU": 16}, 3, None, (*SPOT, "cpu-spot-r7i"), {"cpu": 3}),
        ({"CPU": 1}, 8, "gpu", (), {"gpu-spot": 1}),
        ({"CPU": 1}, 8, "cpu", (), {"cpu-spot": 1}),
        ({"CPU": 7, "GPU": 1}, 1, "gpu-a100", (), {}),  # its max_workers is 0
    ],
)
def test_work_starts_spot_nodes_of_its_label_and_others_if_there_are_none(
    resources: dict[str, float], count: int, label: str | None, failed: tuple[str, ...], nodes: dict[str, int]
) -> None:
    config = load("aws.yaml")
    labels = {name: found["labels"]["node-type"] for name, found in config["available_node_types"].items()}
    assert labels == {name: name.partition("-spot")[0] for name in labels}
    for name, size in AWS_RESOURCES.items():
        config["available_node_types"][name]["resources"] = size
    assert launched(config, resources, count, {"node-type": label} if label else {}, failed) == nodes


def test_spot_is_what_the_names_say_and_every_disk_is_encrypted() -> None:
    for name, node_type in load("aws.yaml")["available_node_types"].items():
        node_config = node_type["node_config"]
        market = {"MarketType": "spot"} if "-spot" in name else None
        assert node_config.get("InstanceMarketOptions") == market, name
        assert [disk["Ebs"]["Encrypted"] for disk in node_config["BlockDeviceMappings"]] == [True]


@pytest.mark.slow
def test_no_port_is_open_to_the_internet(ec2: Any, bootstrapped: dict[str, Any]) -> None:
    """All nodes are in the group of the stack, to which Ray adds no rule: Ray opens SSH in a group that it makes."""
    [group] = ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": ["riptide"]}])["SecurityGroups"]
    [rule] = group["IpPermissions"]
    assert rule["IpRanges"] == []
    assert [pair["GroupId"] for pair in rule["UserIdGroupPairs"]] == [group["GroupId"]]
    for node_type in bootstrapped["available_node_types"].values():
        assert node_type["node_config"]["SecurityGroupIds"] == [group["GroupId"]]


def test_the_regions_are_the_same() -> None:
    text = (CLUSTER / "aws.yaml").read_text()
    assert set(re.findall(r"\b[a-z]{2}-[a-z]+-\d", text)) == {load("aws.yaml")["provider"]["region"]}


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


@pytest.mark.parametrize("gpu", [False, True])
def test_nodes_install_the_build_of_their_kind(gpu: bool, tmp_path: Path) -> None:
    """The command runs in a shell, with a pip that prints its arguments and an nvidia-smi that finds a GPU or none."""
    [command] = [command for command in load("aws.yaml")["setup_commands"] if "pip install" in command]
    tools = tmp_path / "riptide-env/bin"
    tools.mkdir(parents=True)
    for path, script in {tools / "pip": 'echo "$@"', tools / "nvidia-smi": f"exit {int(not gpu)}"}.items():
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    variables = {"HOME": str(tmp_path), "PATH": f"{tools}:/usr/bin:/bin"}
    said = subprocess.run(["bash", "-c", command], env=variables, check=True, capture_output=True, text=True).stdout
    index = "" if gpu else "--extra-index-url https://download.pytorch.org/whl/cpu "
    versions = f"-c {tmp_path}/riptide/constraints.txt"
    assert said.splitlines() == [
        f"install {index}{versions} torch",
        f"install {versions} {tmp_path}/riptide[all,{'gpu' if gpu else 'cpu'}]",
    ]


def test_nodes_know_their_region_and_their_cache(tmp_path: Path) -> None:
    """What a node's shell exports after two runs of the command, as `ray up` runs it again for each change."""
    config = load("aws.yaml")
    [command] = [command for command in config["setup_commands"] if ".bashrc" in command]
    for _ in range(2):
        subprocess.run(["bash", "-c", command], env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}, check=True)
    assert (tmp_path / ".bashrc").read_text().splitlines() == [
        'export PATH="$HOME/riptide-env/bin:$PATH"',
        f"export AWS_DEFAULT_REGION={config['provider']['region']}",
        "export RIPTIDE_CACHE=/opt/dlami/nvme/riptide",
    ]
    assert 'sudo install -d -o "$USER" /opt/dlami/nvme/riptide' in config["setup_commands"]


def test_commands_of_aws_yaml_are_shell() -> None:
    config = load("aws.yaml")
    for name in ("setup_commands", "head_start_ray_commands", "worker_start_ray_commands"):
        for command in config[name]:
            subprocess.run(["bash", "-n", "-c", command], check=True)
