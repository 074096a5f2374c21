"""What a person runs: one file per job."""

from jobs.common.starting import handle_signals

handle_signals()
