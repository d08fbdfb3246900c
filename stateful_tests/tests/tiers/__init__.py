"""A second tier: its clauses, faults that are put into a release, and releases as they are driven."""
