"""Telemetry of jobs, workers and servers: seconds per phase, use of GPUs, log lines and spans.

gpus         peak memory and utilisation of the GPUs that a process uses
logs         log lines on stderr, as text or as JSON with job, artifact, part and node
phases       seconds that a process spends in each phase of its work, with its other measures
spans        OpenTelemetry spans of jobs, stages and requests
submission   the id of a job on a Ray cluster
"""
