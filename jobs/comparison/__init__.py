"""Parts of the comparison of two runs: values, charts, printed table and HTML page.

values            means and tests of each metric, and a row per query
comparison        the result: the values as a document, a data frame and a page
comparing         the function `compare`
compare_options   options of `compare`, and those that it shares with `judge`
compared_rows     the rows, from the hits of both runs
shown_passages    the passages that a comparison shows, with their texts
printed_table     the lines that the job prints
svg               elements and axes of SVG pictures
charts            the charts of the page
examples          the won and lost queries of the page, with their passages
comparison_page   the page
"""
