"""A study: what weaker run-time checks see of named bugs, and which wrong partitions balance. No verdict
of another room rests on these checks."""
