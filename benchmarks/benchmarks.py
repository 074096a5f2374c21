"""When a benchmark runs as a file: finds the packages of this checkout first, as jobs/jobs.py does for jobs.

`python benchmarks/encode.py` puts benchmarks/ first on the path, so that `import benchmarks` finds this module. It puts
the folder of the packages in place of benchmarks/, and lets the package `benchmarks` take its own place. Thus a script
imports from `benchmarks` before it imports other packages of the project.
"""

import importlib
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent
sys.path[:] = [str(BENCHMARKS.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != BENCHMARKS)]
if __name__ == "benchmarks":
    del sys.modules["benchmarks"]
    importlib.import_module("benchmarks.common")
