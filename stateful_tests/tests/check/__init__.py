"""Tests of random runs, shrinking, coverage and blind spots."""
