"""Parts that all jobs share: options, plans, Ray sessions, and what they print.

cut_counts        prints how many queries and pairs were cut to a length limit
job_options       options that jobs share: of every job, of the cluster, of the workers
job_metrics       exports the counters and gauges of a job's stages through Ray
flat_options      the options of a job as one flat list, read from its dataclasses
plans             prints the plan of a job with the estimate of its work, or runs the job
printing          prints lines for the user of a job, or warnings for a program that calls jobs
session           decides whether a job runs on Ray or in its own process, and connects
shards            plans an index in Lucene shards, or fills its pending shards
stage_progress    the progress of a stage, printed and measured
standard_output   prints a line to standard output, which may be full
starting          how the process was started, names of commands in messages, and signals until the job runs
"""
