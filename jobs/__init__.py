"""What a person runs: one file per job."""

from jobs.starting import handle_signals

handle_signals()
