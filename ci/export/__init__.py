"""A trace for people without kvspec: a unit test in plain Python, or the text of a bug report."""
