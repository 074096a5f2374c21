"""The id of a job on a Ray cluster, which labels its metrics, spans and log lines."""

from __future__ import annotations

import json
import os
import sys

SUBMISSION_VARIABLE = "RIPTIDE_SUBMISSION"  # set for the workers of a submitted job, which lack Ray's own variable


def submission_id() -> str:
    """Returns the submission id of the job of this process, or Ray's job id without a submission, or "" without Ray."""
    config = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    if submitted := config.get("metadata", {}).get("job_submission_id"):
        return str(submitted)
    if inherited := os.environ.get(SUBMISSION_VARIABLE):
        return inherited
    ray = sys.modules.get("ray")
    return str(ray.get_runtime_context().get_job_id()) if ray is not None and ray.is_initialized() else ""
