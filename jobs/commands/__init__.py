"""Runs jobs as commands: arguments, exit statuses, signals, and chains of jobs.

cli            runs a job, and turns its errors and signals into a line and an exit status
command_line   reads options from a YAML file and from arguments, and prints --help
console        runs the command `riptide`: lists the jobs, runs one, and prints completion scripts
steps          reads and checks the steps of a chain of jobs
stopping       signals that end a job; a training ends after its step
"""
