"""Tests of pairs of servers: clauses, planted faults, known faults of releases."""
