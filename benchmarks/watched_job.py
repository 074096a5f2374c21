"""Runs a job and measures it: seconds, and the peak memory of the job's process and of all its processes together.

    python benchmarks/watched_job.py mine_negatives --store S --sources bm25 exact:minilm --name hard

The options after the name are those of the job, whose lines are printed. The memory of all processes is the sum of the
proportional set sizes (PSS) of the job and its descendants; that of the job's process is its largest resident set.
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
    megabytes = [round(size / 1e6) for size in (job.pss_bytes, job.rss_bytes)]
    print(f"{job.seconds:.1f} s, all processes {megabytes[0]:,} MB, the job's process {megabytes[1]:,} MB")


if __name__ == "__main__":
    main()
