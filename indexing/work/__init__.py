"""Resumable work: the description of an artifact to make, the function that runs it, and several runners.

worker_tasks      the work of one worker, its resources, and runners
work              the description of an artifact: units and stages; run_work, which begins, resumes and completes it
measured_worker   the seconds of a worker by phase: opening, computing, waiting
growth            work that makes the next generation of what grows with its corpus or its embeddings
local_runner      a runner in this process: threads, or processes for work that holds Python's lock
ray_tasks         a runner on a Ray cluster: one Ray task for each item
ray_actors        the same with actors, for workers that take long to open
ray_progress      progress within the items of workers on Ray
nodes             the nodes of a cluster: the size of a worker on them, and waiting for nodes
visibility        checks that the nodes see the driver's store
polling           calls a function every few seconds
required_device   the kind of device that a numerics class demands
"""
