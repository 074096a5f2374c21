"""The service of one process: its queues, engine and live release, and changes of the live release.

service_options   options of a service
example_queries   example queries, which the page offers
batch_queues      queues whose waiting items form batches
warm_up           reads the files of a release and runs queries before it becomes live
loops             background loops, which no error ends
staleness         whether the store holds newer artifacts than the live release
erased_rows       the rows of passages that were erased from the store while the server runs
service           the live release, and the queues in front of the engine
prompt_uploads    prompts that come over HTTP: checks, commits and tasks
uploads           a bounded number of these checks at once, each with a deadline
changes           changes of the live release
certification     recall of a sample of the searches, against exact search
audit             a log line per change that an administrator made
"""
