# What a developer runs: `make help` lists the targets.

PYTHON ?= $(shell python3.11 -c 'import sys; print(sys.executable)' 2>/dev/null || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SYSTEM := chaos or browser or ray_serve or nodes or quality or arm or azure
# All tests of a file run in one of two processes. PARALLEL= runs the tests one after the other. If one of the processes
# crashes, the run ends; if that was in a test on Ray, a second run does the rest (tests/crashes.py).
BY_FILE := --dist loadfile --no-loadscope-reorder --max-worker-restart 0
PARALLEL ?= -n 2 $(BY_FILE)
unexport RIPTIDE_CONTINUE  # run_tests sets it for the second run
run_tests = @export HF_HUB_OFFLINE=1; for run in first second; do set -x; \
	  $(BIN)/python -m pytest $1 --durations=10 -m "$2"; status=$$?; { set +x; } 2>/dev/null; \
	  test $$status = 9 || exit $$status; export RIPTIDE_CONTINUE=1; done; exit 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install browser prometheus arm azurite lint test test-fast test-system test-all release image bench demo

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## .venv with the project (editable), faiss-cpu and the developers' tools, at the versions of constraints.txt

$(STAMP): pyproject.toml constraints.txt install.py
	@rm -f $@
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python install.py cpu dev
	@touch $@

browser:  ## Chromium and its driver, for the tests of the page, where there are none (by apt, as root)
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver; } >/dev/null

prometheus: install  ## Prometheus and promtool in .venv/bin, for the tests of cluster/monitoring, if they are missing (by apt; no service)
	@command -v prometheus >/dev/null && command -v promtool >/dev/null || test -x $(BIN)/promtool || { cd $(VENV) && \
	  get="apt-get download -qq -o APT::Sandbox::User=root prometheus" && { $$get || { apt-get update -qq && $$get; }; } && \
	  dpkg-deb --fsys-tarfile prometheus_*.deb | \
	  tar -x -C bin --strip-components=3 ./usr/bin/prometheus ./usr/bin/promtool && rm prometheus_*.deb; }

arm:  ## a compiler and an emulator for ARM, for the tests of the kernels, if they are missing (by apt, as root)
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null || \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends g++-aarch64-linux-gnu qemu-user; } >/dev/null

azurite: install  ## Azurite, the emulator of Azure, and the examples of CommonMark in .venv, for tests, if they are missing (by npm)
	@test -e $(VENV)/node_modules/azurite -a -e $(VENV)/node_modules/commonmark-spec || \
	  npm install --silent --no-audit --no-fund --prefix $(VENV) azurite@3.37.0 commonmark-spec@0.31.2

lint: install  ## ruff (rules and format), mypy, and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: install lint  ## lint, and all tests but those of test-system
	$(call run_tests,$(PARALLEL),not ($(SYSTEM)))

test-fast: install  ## the tests that need no more than seconds
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m "not slow and not cluster and not ($(SYSTEM))"

test-system: install browser prometheus arm azurite  ## whole systems in a short form: random kills, several nodes, a browser, Ray Serve, a published figure, ARM
	$(call run_tests,-n 1 $(BY_FILE),$(SYSTEM))

test-all: install browser prometheus arm azurite lint  ## every test in its long form
	@trap "exit 130" INT; status=0; export RIPTIDE_TESTS=all HF_HUB_OFFLINE=1; set -x; \
	$(BIN)/python -m pytest $(PARALLEL) --durations=25 -m "not ($(SYSTEM))" || status=1; \
	$(BIN)/python -m pytest --durations=25 -m "$(SYSTEM)" || status=1; exit $$status

release: install  ## the files of a release in dist/: wheel, source archive, hashes of all packages, bills of materials
	$(BIN)/python release.py

image: install  ## the images of the release in dist/, built and pushed by docker (IMAGE=registry.example.com/riptide)
	$(BIN)/python release.py --image "$(IMAGE)"

bench:  ## the benchmarks there are, and what each one measures
	@for file in benchmarks/*.py; do test -e "$$file" && printf '  %s  %s\n' "$$file" \
	  "$$(sed -n '1s/^"""//p' "$$file" | sed 's/"""$$//')"; done; true

demo: install  ## all steps on a small set: import, encode, index, search, train a prompt, serve
	@HF_HUB_OFFLINE=1 $(BIN)/python examples/demo.py
