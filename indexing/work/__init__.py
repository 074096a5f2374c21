"""Resumable work: one description of what makes an artifact, one function that runs it, several runners.

tasks.py    what one worker does, and what it needs
work.py     the description of an artifact: units and stages; run_work, which begins, resumes and completes it
local.py    a runner in this process: threads, or processes for work that holds Python's lock
ray_tasks.py, ray_actors.py    runners on a Ray cluster; ray_progress.py: progress within the items of their workers
conflicts.py    describes why a name of the store is taken
"""
