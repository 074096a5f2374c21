"""What the files of cluster/ say about the rest of the project: jobs, recipes, versions, image, the submitted code."""

import re
import shlex
import shutil
import subprocess
import tomllib
import zipfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_files import AWS_RESOURCES, CLUSTER, ROOT, autoscaling_config, cluster_of, launched, load
from documented_commands import job_refusal
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

DOCKERFILE = (CLUSTER / "Dockerfile").read_text()


def constraints() -> dict[str, str]:
    """Package -> version of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("path", sorted(path.name for path in CLUSTER.iterdir() if path.is_file()))
def test_no_key_lies_about(path: str) -> None:
    assert re.findall(r"AKIA[0-9A-Z]{16}|-----BEGIN", (CLUSTER / path).read_text()) == []


def installed_files() -> set[str]:
    """What `pip install .` reads, by pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    setuptools = project["tool"]["setuptools"]
    packages = {pattern.rstrip("*") for pattern in setuptools["packages"]["find"]["include"]}
    linked = {link.name for package in packages for link in (ROOT / package).iterdir() if link.is_symlink()}
    metadata = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    return packages | linked | metadata | {"constraints.txt"}


def test_nodes_get_what_an_installation_needs() -> None:
    mounts = load("aws.yaml")["file_mounts"]
    local = {path for remote, path in mounts.items() if remote.startswith("~/riptide/")}
    assert local == installed_files() | {"cluster/serve.env"}
    assert all(remote == f"~/riptide/{path}" for remote, path in mounts.items() if path in local)
    assert [path for path in sorted(local) if not (ROOT / path).exists()] == []


PAGE = ROOT / "docs/cluster.md"


def submitted() -> list[str]:
    """Every `python -m riptide x …` that the page submits to a cluster."""
    text = PAGE.read_text().replace("\\\n", " ")
    return re.findall(r"ray job submit --working-dir \. -- +(python -m riptide [\w-]+ --[^\n`]+)", text)


def test_what_the_page_submits_has_what_it_needs() -> None:
    """A token, made before it is exported; a store that is found from another folder."""
    text = PAGE.read_text()
    exports = (
        "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=~/.ray/auth_token RAY_API_SERVER_ADDRESS=http://127.0.0.1:8265"
    )
    places = [text.index(words) for words in ("ray get-auth-token --generate", exports, "ray job submit")]
    assert places == sorted(places)
    assert submitted()
    for command in submitted():
        if "--store" in command:
            assert re.search(r"--store (s3://|\$PWD/)", command), command


def test_the_job_of_kubernetes_has_options_that_exist() -> None:
    words = shlex.split(load("rayjob.yaml")["spec"]["entrypoint"].removeprefix("riptide "))
    assert job_refusal(words, is_partial=False) == ""


def test_versions_are_those_of_the_constraints() -> None:
    pinned = constraints()
    assert load("rayjob.yaml")["spec"]["rayClusterSpec"]["rayVersion"] == pinned["ray"]
    for path in ("cluster/Dockerfile", "install.py"):
        text = (ROOT / path).read_text()
        found = dict(re.findall(r"\b(ray|torch|faiss-cpu|faiss-gpu)==([0-9.]+[0-9])", text))
        assert found == {"torch": pinned["torch"]}, path
        assert "constraints.txt" in text, path


def test_constraints_cover_what_the_project_asks_for() -> None:
    """Each requirement of pyproject.toml, extras included, has one exact version that it allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = constraints()
    for line in chain(project["dependencies"], *project["optional-dependencies"].values()):
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        if name == "riptide":  # an extra that consists of others
            continue
        assert name in pinned, f"constraints.txt has no {name}"
        assert requirement.specifier.contains(pinned[name]), f"{line}, but constraints.txt has {pinned[name]}"


def test_image_copies_what_exists() -> None:
    """The image holds all that an installation needs, owned by a plain user."""
    copied = {
        source for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, flags=re.MULTILINE) for source in line.split()
    }
    releases = {"dist/requirements-*.txt"}  # copied if `make release` has made them
    assert [path for path in sorted(copied - releases) if not (ROOT / path).exists()] == []
    assert installed_files() | releases <= copied
    assert "useradd --create-home --uid 1000 ray" in DOCKERFILE
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, flags=re.MULTILINE) == ["1000"]


@pytest.mark.parametrize("is_release", [False, True])
def test_the_image_installs_by_hash_from_a_release_and_otherwise_by_version(is_release: bool, tmp_path: Path) -> None:
    """The command of the Dockerfile runs in sh, with a pip that prints its arguments."""
    [command] = re.findall(r"^RUN (export PIP_NO_CACHE_DIR=1 .*?[^\\])\n", DOCKERFILE, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "pip").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "pip").chmod(0o755)
    if is_release:
        (tmp_path / "requirements-gpu.txt").write_text("")
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "EXTRA": "gpu", "TORCH_INDEX": ""}
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, env=variables, text=True, capture_output=True, check=True
    )
    by_hash = ["install --require-hashes -r requirements-gpu.txt"]
    by_version = [
        f"install -c constraints.txt torch=={constraints()['torch']}",
        "install -c constraints.txt .[all,gpu]",
        "uninstall -y riptide",
    ]
    assert done.stdout.splitlines() == (by_hash if is_release else by_version)


def test_nodes_have_the_variables_of_ray_serve_that_the_job_sets() -> None:
    from riptide.jobs import serve_search

    expected = {**serve_search.RAY_SERVE, **serve_search.HAPROXY}
    lines = [line for line in (CLUSTER / "serve.env").read_text().splitlines() if not line.startswith("#")]
    assert dict(shlex.split(line)[0].split("=", 1) for line in lines) == expected
    [block] = re.findall(r"^ENV (RAY_SERVE_[^#]*?[^\\])\n", DOCKERFILE, flags=re.MULTILINE)
    assert dict(pair.split("=", 1) for pair in shlex.split(block.replace("\\\n", " "))) == expected


@pytest.mark.parametrize("name", ["head_start_ray_commands", "worker_start_ray_commands"])
def test_the_start_commands_of_aws_find_the_files_that_they_source(name: str, tmp_path: Path) -> None:
    """With the mounted files Ray starts with the variables of Ray Serve; without them it does not start."""
    home, programs = tmp_path / "home", tmp_path / "bin"
    for remote, local in load("aws.yaml")["file_mounts"].items():
        if local.startswith("cluster/"):
            mounted = home / remote.removeprefix("~/")
            mounted.parent.mkdir(parents=True)
            shutil.copy(ROOT / local, mounted)
    programs.mkdir()
    (programs / "ray").write_text("#!/bin/sh\necho started; env\n")
    (programs / "ray").chmod(0o755)
    environment = {"HOME": str(home), "PATH": f"{programs}:/usr/bin:/bin", "RAY_HEAD_IP": "127.0.0.1"}

    def start() -> tuple[int, list[str]]:
        command = load("aws.yaml")[name][-1]
        done = subprocess.run(["bash", "-c", command], env=environment, text=True, capture_output=True, check=False)
        return done.returncode, done.stdout.splitlines()

    status, lines = start()
    assert (status, lines[0]) == (0, "started")
    expected = [line for line in (CLUSTER / "serve.env").read_text().splitlines() if not line.startswith("#")]
    assert {shlex.split(line)[0] for line in expected} <= set(lines)
    (home / "riptide/cluster/serve.env").unlink()
    status, lines = start()
    assert status != 0
    assert lines == []


def test_serve_yaml_is_what_ray_serve_and_the_application_take() -> None:
    from ray.serve.schema import ServeDeploySchema

    from riptide.serve import deployments

    config = ServeDeploySchema.model_validate(load("serve.yaml"))
    [application] = config.applications
    module, _, name = application.import_path.partition(":")
    assert (module, getattr(deployments, name)) == ("riptide.serve.deployments", deployments.build)
    args = deployments.Application(**application.args)
    assert args.tokens
    assert not args.without_tokens
    assert args.most
    assert args.most > args.replicas
    text = (CLUSTER / "serve.yaml").read_text()
    divided = yaml.safe_load(re.sub(r"^( +)# (?=row_ranges|leaf_)", r"\1", text, flags=re.MULTILINE))
    assert deployments.Application(**divided["applications"][0]["args"]).row_ranges == 4
    with pytest.raises(ValueError, match="shard_count"):
        deployments.build({**application.args, "shard_count": 3})


def worker_sizes(recipe: Any) -> Iterator[tuple[int, dict[str, float]]]:
    """(workers, resources of each) of every step of a recipe that asks for GPUs."""
    if isinstance(recipe, dict):
        if "gpus" in recipe:
            yield recipe.get("workers", recipe.get("max_workers")), {"CPU": recipe["cpus"], "GPU": recipe["gpus"]}
        for value in recipe.values():
            yield from worker_sizes(value)
    elif isinstance(recipe, list):
        for value in recipe:
            yield from worker_sizes(value)


RECIPES = [path for path in sorted((ROOT / "jobs/recipes").glob("*.yaml")) if "gpus: " in path.read_text()]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_clusters_have_room_for_the_recipes(path: Path) -> None:
    """The autoscaler starts a GPU node for each worker, on AWS and on Kubernetes."""
    aws = load("aws.yaml")
    for name, resources in AWS_RESOURCES.items():
        aws["available_node_types"][name]["resources"] = resources
    sizes = list(worker_sizes(yaml.safe_load(path.read_text(encoding="utf-8"))))
    assert sizes
    for node_type, config in (("gpu-spot", aws), ("gpu", autoscaling_config(cluster_of("raycluster.yaml")))):
        for workers, resources in sizes:
            assert launched(config, resources, workers, {}) == {node_type: workers}, (path.name, resources)


def test_a_submission_sends_the_code_and_little_else(tmp_path: Path) -> None:
    """The package that `ray job submit --working-dir .` makes of the checkout."""
    from ray._private.runtime_env.packaging import create_package
    from ray._private.runtime_env.working_dir import upload_working_dir_if_needed

    package = tmp_path / "package.zip"

    def create(working_dir: str, excludes: list[str], is_file: bool = False) -> None:
        create_package(working_dir, package, include_gitignore=True, excludes=excludes)

    upload_working_dir_if_needed({"working_dir": str(ROOT)}, include_gitignore=True, upload_fn=create)
    with zipfile.ZipFile(package) as zipped:
        files = [name for name in zipped.namelist() if not name.endswith("/")]  # it also has empty folders
        names = {name.partition("/")[0] for name in files}
        assert "jobs/recipes/pipeline-squad.yaml" in zipped.namelist()
    assert {"riptide", "retriever", "indexing", "serve", "jobs", "examples"} <= names
    assert not {".git", ".venv", "benchmarks", "data", "docs", "results", "tests"} & names
    assert package.stat().st_size < 15e6
