"""What all packages use, and what imports none of them.

arguments       arguments of calls from Python: values of other libraries as plain ones, and unknown names
cuts            counts of the texts that were cut to a length limit
errors          exceptions with messages for users, and functions that shorten names and texts in messages
extras          packages that not every user needs, and the extras that install them
figures         figures of matplotlib as PNG files
forks           refuses work that would wait forever in a forked process
html_page       HTML pages of results, and their tables and pictures
memory          the memory that this process may still use
native          compiles C++ kernels on first use, and loads them
option_fields   how a field of a dataclass declares an option of a job
unicode         Unicode normal forms of texts, and their words in any script
wording         parameters and commands in messages, which each front end writes in its own words
yaml_files      reads a YAML file
"""
