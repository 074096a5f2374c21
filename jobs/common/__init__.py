"""What all jobs share: the command line, signals, sessions with Ray, steps of recipes, and printed lines.

cli            runs a job: handles errors and signals, prints the stages and their progress
command_line   reads options from a YAML file and from arguments, and prints --help
console        runs the command `riptide`: lists the jobs, runs one, and prints completion scripts
cuts           prints how many queries and pairs were cut to a length limit
metrics        exports the counters and gauges of a job's stages through Ray
options        the options of a job as one flat list, read from its dataclasses
session        decides whether a job runs on Ray or in its own process, and connects
shards         plans an index in Lucene shards, or fills its pending shards
starting       how the process was started, names of commands in messages, and signals until the job runs
steps          reads and checks the steps of a chain of jobs
stopping       stops a training after its step at the first signal
workers        the options of the workers of a job
yaml_files     reads a YAML file
"""
