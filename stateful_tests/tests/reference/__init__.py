"""Tests of the model, its rules and clauses."""
