"""Faults that were not thought of: small changes of the code, one at a time, and what notices each.

A mutant of the built-in implementation or of a rule must be noticed by random runs of one beside the other,
a mutant of a clause by the fixtures and tests that the clause is there for. One that nothing notices is a
hole in the specification, or changes nothing that could be noticed: then `accepted.json` says why.
"""
