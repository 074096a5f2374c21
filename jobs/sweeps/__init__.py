"""Sweeps: a training job for every combination of some options, of which the dev split chooses one."""
