"""Runs a job and measures it: seconds, CPU seconds, and the peak memory of its process and of all processes together.

    python benchmarks/watched_job.py mine_negatives --store S --sources bm25 exact:minilm --name hard

The options after the name are those of the job, whose lines are printed. The memory of all processes is the sum of the
proportional set sizes (PSS) of the job and its descendants; "anonymous" is the part of it that maps no file. That of
the job's process is its largest resident set.
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
    total, anonymous, of_job = (round(size / 1e6) for size in (job.pss_bytes, job.anonymous_bytes, job.rss_bytes))
    print(
        f"{job.seconds:.1f} s, {job.cpu_seconds:.1f} CPU s; all processes {total:,} MB, of which {anonymous:,} MB "
        f"anonymous; the job's process {of_job:,} MB"
    )


if __name__ == "__main__":
    main()
