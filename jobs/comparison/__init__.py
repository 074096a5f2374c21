"""Parts of the comparison of two runs: its values, its table, and its page.

comparison    the result: means, tests, and a row per query
comparing     the function `compare`
options       options of `compare`
rows          the rows, from the hits of both runs
passages      the passages that a comparison shows, with their texts
table         the lines that the job prints
svg           elements and axes of SVG pictures
charts        the charts of the page
examples      the won and lost queries of the page, with their passages
page          the page
"""
