"""Telemetry of jobs, workers and servers: seconds per phase, log lines and spans.

logs         log lines on stderr, as text or as JSON with job, artifact, part and node
phases       seconds that a process spends in each phase of its work
spans        OpenTelemetry spans of jobs, stages and requests
submission   the id of a job on a Ray cluster
"""
