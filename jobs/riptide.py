"""Makes a job that runs as a file import the package `riptide` of this checkout, before any other on the path.

`python jobs/search.py` puts jobs/ first on the path, so that `import riptide` finds this module. It puts the folder
above in place of jobs/, in which search.py, evaluate.py and others would hide packages of those names. Then it imports
the package `riptide`, which takes its own place, and handles signals until the job runs.
"""

import sys
from pathlib import Path

JOBS = Path(__file__).resolve().parent
sys.path[:] = [str(JOBS.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != JOBS)]
if __name__ == "riptide":
    del sys.modules["riptide"]
    from riptide.jobs.common.starting import handle_signals

    handle_signals()
