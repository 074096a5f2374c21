"""Runs a job and measures it: seconds, and the peak memory of all its processes together and of its own.

    python benchmarks/watched_job.py mine_negatives --store S --sources bm25 exact:minilm --name hard

The options after the name are those of the job, whose lines are printed. The memory of all processes is the sum of the
proportional set sizes (PSS) of the job and its descendants; that of its own process is its largest resident set.
"""

from __future__ import annotations

from benchmarks.common.program import Parser
from benchmarks.common.watching import watch_job


def main() -> None:
    """Reads the options, runs the job, and prints its lines and the figures."""
    parser = Parser(__doc__)
    parser.add("job", None, "name of a job, as of its file in jobs/")
    parser.add("--store", None, "store of the job", required=True)
    options, job_options = parser.parse_known_args()
    job = watch_job(options.store, options.job, *job_options)
    print(job.output, end="")
    print(f"{job.seconds:.1f} s, all processes {job.pss_bytes / 1e9:.2f} GB, own process {job.rss_bytes / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
