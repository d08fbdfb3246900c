"""When it is run, and how it is shown: the command line, tiers, benchmarks and reports."""
