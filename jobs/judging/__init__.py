"""Parts of the job `judge`: two runs are compared by few verdicts of people.

judge_options   options of `judge`
judging         opens the runs and the folder of verdicts, and estimates the difference
judging_files   the files of the folder: pairs to judge, verdicts and the report
judging_page    the page on which an assessor judges pairs
"""
