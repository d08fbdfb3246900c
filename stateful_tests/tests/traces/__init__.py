"""Tests of trace files, notation and recordings."""
