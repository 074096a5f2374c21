"""Measures how long /healthz takes while clients send the worst known requests, for one or several checkouts.

    git worktree add ../before COMMIT
    python benchmarks/hostile_requests.py --checkouts ../before . --json results/hostile_requests.json

For each request of benchmarks/hostile/ (requests.py, uploads.py), each checkout serves a copy of one store on loopback.
32 clients send the request in a closed loop for a few seconds, and each sends it a few times at most. Another process
requests /healthz on new connections until all clients have ended, and for a second more. The slowest response and the
99th percentile are reported, and those without any client. The target is below 100 ms on an idle machine of two cores.
A response that does not come within --patience seconds counts with that time. The server is started again where it does
not answer after a request, and stopped by its process id at the end.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.files import write_json
from benchmarks.common.program import ROOT, Parser
from benchmarks.hostile.measurement import Server, measure
from benchmarks.hostile.requests import REQUESTS
from benchmarks.hostile.store import make_store, prompt_folder
from benchmarks.hostile.uploads import prompt_uploads

IDLE = "no hostile client"


def main() -> None:
    """Reads the options, makes the store, measures all requests for each checkout, prints and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--checkouts", [ROOT], "checkouts to compare")
    parser.add("--store", None, "store of an earlier run (--keep) to copy; default: make one")
    parser.add("--keep", None, "empty folder in which the store is made and kept", type=Path)
    parser.add("--only", [""], "requests whose names start with one of these")
    parser.add("--clients", 32, "number of hostile clients")
    parser.add("--seconds", 5, "time in which requests begin", type=float)
    parser.add("--most", 20, "requests per client at most")
    parser.add("--patience", 20, "time limit of a response ( s )", type=float)
    parser.add("--json", Path("results/hostile_requests.json"), "output file")
    options = parser.parse_args()
    figures: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="riptide-hostile-") as folder:
        store = options.store or make_store(options.keep or Path(folder, "store"))
        requests = {**REQUESTS, **prompt_uploads(prompt_folder(store))}
        servers = {}
        for number, checkout in enumerate(options.checkouts):
            copy = shutil.copytree(store, Path(folder, f"copy{number}"))
            servers[str(checkout)] = Server(checkout.resolve(), str(copy))
        try:
            for name in [IDLE, *(name for name in requests if name.startswith(tuple(options.only)))]:
                request = None if name == IDLE else requests[name]()
                figures[name] = {}
                for checkout, server in servers.items():
                    measured = figures[name][checkout] = measure(server, request, options)
                    times = f"slowest {measured['slowest_ms']:9,.1f} ms, p99 {measured['p99_ms']:9,.1f} ms"
                    growth = f"{measured['memory_growth_mib']:5} MiB, {measured['statuses']}"
                    print(f"{name:30} {checkout:20} {times}, {measured['seconds']:5.1f} s, {growth}", flush=True)
        finally:
            for server in servers.values():
                server.stop()
    write_json(options.json, {"cpus": os.cpu_count(), "load": os.getloadavg(), "requests": figures})


if __name__ == "__main__":
    main()
