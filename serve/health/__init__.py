"""Health of the parts of a service: their failures, their files, and the warm-up before they are ready."""
