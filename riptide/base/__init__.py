"""Utilities of all other packages; they import none of these packages.

arguments       checks arguments of Python calls: plain values, and unknown parameter names
cuts            counts of the texts that were cut to a length limit
errors          exceptions with messages for users
figures         matplotlib figures as PNG files
html_page       HTML pages of results, and their tables and pictures
option_fields   dataclass fields that declare the options of jobs
unicode         Unicode normal forms of texts, and their words in any script
wording         printable texts of limited length in messages, and placeholders, which each front end renders
text_files      reads small text files
yaml_files      reads YAML files
"""
