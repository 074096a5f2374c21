"""gcp.yaml, by Ray's own validation and against aws.yaml, and slurm.sh, with programs in place of Slurm's and Ray's.

What stays unproven here: a start on the real Google Cloud and on a real Slurm.
"""

import copy
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from cluster_files import CLUSTER, DELETED, changed, launched, load

COMMON = ("cluster_name", "max_workers", "upscaling_speed", "idle_timeout_minutes", "file_mounts", "rsync_exclude")
START = ("head_start_ray_commands", "worker_start_ray_commands")
SPOT = ("cpu-spot", "gpu-spot")


def validate_gcp(config: dict[str, Any]) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(copy.deepcopy(config)))


def test_ray_accepts_gcp_yaml() -> None:
    validate_gcp(load("gcp.yaml"))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("provider", "project"), DELETED),
        (("provider", "region"), 1),
        (("auth", "ssh_proxy_command"), DELETED),
        (("available_node_types", "gpu", "resources"), DELETED),
        (("available_node_types", "gpu-spot", "priority"), "high"),
        (("setup_command",), []),
    ],
)
def test_ray_refuses_a_broken_gcp_yaml(path: tuple[str | int, ...], value: object) -> None:
    with pytest.raises((jsonschema.ValidationError, ValueError, KeyError)):
        validate_gcp(changed(load("gcp.yaml"), path, value))


def test_it_differs_from_aws_yaml_in_what_is_googles() -> None:
    aws, gcp = load("aws.yaml"), load("gcp.yaml")
    assert [key for key in (*COMMON, *START) if aws[key] != gcp[key]] == []
    assert set(gcp) - set(aws) == {"head_setup_commands"}
    same = [command for command in gcp["setup_commands"] if command in aws["setup_commands"]]
    assert len(same) == len(gcp["setup_commands"]) - 1  # that of the region and of the local disk
    for name, node_type in gcp["available_node_types"].items():
        assert node_type["labels"] == {"node-type": name.partition("-spot")[0]}
        model = node_type["node_config"].get("scheduling", {}).get("provisioningModel", "STANDARD")
        assert model == ("SPOT" if "-spot" in name else "STANDARD"), name


def test_project_and_zone_are_the_same_everywhere() -> None:
    text, provider = (CLUSTER / "gcp.yaml").read_text(), load("gcp.yaml")["provider"]
    assert set(re.findall(r"zones?[/=](us-[\w-]+)", text)) == {provider["availability_zone"]}
    assert provider["availability_zone"].startswith(provider["region"])
    projects = set(re.findall(r"(?:projects/|--project=|@)(\w[\w-]+)(?=[/ .])", text))
    assert projects == {provider["project_id"], "ubuntu-os-cloud", "ubuntu-os-accelerator-images"}


@pytest.mark.parametrize(
    ("resources", "label", "failed", "nodes"),
    [
        ({"CPU": 7, "GPU": 1}, None, (), {"gpu-spot": 4}),
        ({"CPU": 7, "GPU": 1}, None, SPOT, {"gpu": 4}),
        ({"CPU": 16}, None, (), {"cpu-spot": 4}),
        ({"CPU": 16}, "cpu", SPOT, {"cpu": 4}),
    ],
)
def test_work_starts_spot_nodes_and_others_if_there_are_none(
    resources: dict[str, float], label: str | None, failed: tuple[str, ...], nodes: dict[str, int]
) -> None:
    labels = {"node-type": label} if label else {}
    assert launched(load("gcp.yaml"), resources, 4, labels, failed) == nodes


PROGRAMS = {
    "scontrol": 'test "$*" = "show hostnames node[1-3]" && printf "node1\\nnode2\\nnode3\\n"',
    # The options of srun end at the program.
    "srun": 'while [ "${1#-}" != "$1" ]; do echo "srun $1"; shift; done; exec "$@"',
    "ray": 'if [ "$1" = get-auth-token ]; then mkdir ~/.ray; echo token > ~/.ray/auth_token; else echo "$@"; env; fi',
}


def run_slurm(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    programs = home / "bin"
    programs.mkdir(exist_ok=True)
    for name, script in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{script}\n")
        (programs / name).chmod(0o755)
    variables = {"SLURM_JOB_NODELIST": "node[1-3]", "SLURM_JOB_NUM_NODES": "3"}
    environment = {"HOME": str(home), "PATH": f"{programs}:{os.environ['PATH']}", **variables}
    command = [CLUSTER / "slurm.sh", *arguments]
    return subprocess.run(command, env=environment, text=True, capture_output=True, check=False)


def test_slurm_starts_ray_on_all_nodes_and_the_job_on_the_first(tmp_path: Path) -> None:
    from ray.scripts.symmetric_run import curate_and_validate_ray_start_args, symmetric_run

    done = run_slurm(tmp_path, "encode-corpus", "--store", "/a folder", "--gpus", "1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["srun --nodes=3", "srun --ntasks=3"]
    given, _, entrypoint = lines[2].partition(" -- ")
    assert entrypoint == "riptide encode-corpus --store /a folder --gpus 1"
    assert given == "symmetric-run --address node1:6379 --min-nodes 3 --dashboard-host=127.0.0.1"
    words = given.split()[1:]
    assert {option for parameter in symmetric_run.params for option in parameter.opts} >= {words[0], words[2]}
    assert curate_and_validate_ray_start_args(words) == ["--dashboard-host=127.0.0.1"]
    assert {"RAY_AUTH_MODE=token", f"RAY_AUTH_TOKEN_PATH={tmp_path}/.ray/auth_token"} <= set(lines)
    assert (tmp_path / ".ray/auth_token").read_text() == "token\n"


def test_slurm_without_a_job_is_refused_in_one_line(tmp_path: Path) -> None:
    done = run_slurm(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: expected a job and its options")
    assert done.stderr.count("\n") == 1
