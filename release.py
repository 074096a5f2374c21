"""Builds the files of a release in dist/ (`make release`), and then its images (`make image IMAGE=…`).

    python release.py
    python release.py --image registry.example.com/riptide

dist/ gets the wheel, the source archive, SHA256SUMS, and for each of cpu and gpu every package with version and hashes
(requirements-cpu.txt, for `pip install --require-hashes -r`) and a bill of materials in CycloneDX (sbom-cpu.cdx.json).
Versions are those of constraints.txt. Hashes come from the indexes of pip's configuration: for a torch without CUDA set
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.

docker builds IMAGE:VERSION-cpu and IMAGE:VERSION-gpu from these files and pushes them; the name of the latter, with its
digest, is written into the files for KubeRay.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from install import pip_config, uv_options

ROOT = Path(__file__).resolve().parent
DIST = ROOT / "dist"
UV = (sys.executable, "-m", "uv")
SBOM_TOOL = "cyclonedx-bom==7.5.0"
BASE = "python:3.11-slim"  # of the images
# Extras that have a list of requirements and an image, and the index of torch's builds for each, besides PyPI.
EXTRAS = {"cpu": "https://download.pytorch.org/whl/cpu", "gpu": ""}


def run(*command: str | Path, **environment: str) -> str:
    """Runs a command in the checkout; returns what it prints, or ends the program with what it printed."""
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"error: {' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def read_version() -> str:
    """Returns the version, which stands in riptide/__init__.py alone."""
    for node in ast.parse((ROOT / "riptide/__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise AssertionError("riptide/__init__.py has no __version__")


def require_release(version: str) -> None:
    """Ends the program unless the checkout is what a release of this version may be built from."""
    archive = Path("tests/jobs/earlier_stores", f"{version.rpartition('.')[0]}.tar.xz")
    if changed := run("git", "status", "--porcelain"):
        sys.exit(f"error: commit these changes first, as a release is built from a commit:\n{changed}")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## \[{re.escape(version)}\]", changelog, re.MULTILINE):
        sys.exit(f"error: CHANGELOG.md has no section `## [{version}]`: rename `## [Unreleased]` to it, with the date")
    if not (ROOT / archive).exists():
        sys.exit(f"error: {archive} is missing: run RIPTIDE_WRITE_STORE=1 pytest tests/jobs/test_earlier_stores.py")


def make_empty(folder: Path) -> None:
    """Makes a folder, and removes all that is in it."""
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        else:
            old.unlink()


def build_packages(folder: Path) -> None:
    """Builds the wheel and the source archive; the same commit gives the same wheel, byte for byte."""
    time = run("git", "log", "-1", "--format=%ct")
    run(*UV, "build", "-q", "--no-build-isolation", "--python", sys.executable, "-o", folder, SOURCE_DATE_EPOCH=time)


def write_requirements(folder: Path, extra: str) -> Path:
    """Writes every package that `riptide[all,EXTRA]` needs, with the hashes of all its files."""
    config = pip_config()
    certificate = {"SSL_CERT_FILE": config["cert"]} if "cert" in config else {}
    file = folder / f"requirements-{extra}.txt"
    # What Python 3.11 needs includes what 3.12 needs. torch without CUDA comes for this platform alone.
    platform = ("--universal",) if extra == "gpu" else ()
    options = ("--generate-hashes", "--no-annotate", "--no-header", "--python-version", "3.11", *platform)
    extras = ("--extra", "all", "--extra", extra)
    versions = ("-c", "constraints.txt")
    compiled = (*UV, "pip", "compile", "-q", "pyproject.toml", *extras, *versions, *options, "-o", file)
    run(*compiled, *uv_options(config), **certificate)
    return file


def write_sbom(requirements: Path, version: str) -> None:
    """Writes the bill of materials of a file of requirements."""
    file = requirements.with_name(requirements.name.replace("requirements", "sbom")).with_suffix(".cdx.json")
    tool = (*UV, "tool", "run", "-q", "--from", SBOM_TOOL, *uv_options(pip_config()), "cyclonedx-py", "requirements")
    run(*tool, requirements, "--pyproject", "pyproject.toml", "--output-reproducible", "--of", "JSON", "-o", file)
    document = json.loads(file.read_text(encoding="utf-8"))
    document["metadata"]["component"]["version"] = version  # pyproject.toml has none: it is read from the package
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def write_sums(folder: Path) -> None:
    """Writes SHA256SUMS, for `sha256sum -c`."""
    names = sorted(path.name for path in folder.iterdir() if path.name not in ("SHA256SUMS", ".gitignore"))
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def build_images(image: str, version: str) -> None:
    """Builds and pushes the image of each extra, and names the one for GPUs in the files for KubeRay."""
    if not (DIST / "SHA256SUMS").exists() or not list(DIST.glob(f"riptide-{version}-*.whl")):
        sys.exit(f"error: dist/ has no release {version}: run `make release` first")
    base = run("docker", "buildx", "imagetools", "inspect", BASE, "--format", "{{.Manifest.Digest}}")
    for extra, index in EXTRAS.items():
        name, metadata = f"{image}:{version}-{extra}", DIST / f"image-{extra}.json"
        values = {"BASE": f"{BASE}@{base}", "EXTRA": extra, "TORCH_INDEX": index}
        arguments = [word for key, value in values.items() for word in ("--build-arg", f"{key}={value}")]
        output = ("--sbom=true", "--provenance=mode=max", "--push", "--metadata-file", metadata)
        run("docker", "buildx", "build", "-f", "cluster/Dockerfile", "-t", name, *arguments, *output, ".")
        name += "@" + json.loads(metadata.read_text(encoding="utf-8"))["containerimage.digest"]
        print(name, flush=True)
        if extra == "gpu":
            for file in (ROOT / "cluster").glob("ray*.yaml"):
                text = file.read_text(encoding="utf-8")
                file.write_text(re.sub(r"(?<=image: &image ).+", name, text), encoding="utf-8")


def main(arguments: list[str]) -> None:
    match arguments:
        case []:
            image = ""
        case ["--image", image] if image:
            pass
        case _:
            sys.exit("error: expected no argument, or --image and a name, for example registry.example.com/riptide")
    version = read_version()
    require_release(version)
    if image:
        build_images(image, version)
        return
    make_empty(DIST)
    build_packages(DIST)
    for extra in EXTRAS:
        write_sbom(write_requirements(DIST, extra), version)
    write_sums(DIST)
    print((DIST / "SHA256SUMS").read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
