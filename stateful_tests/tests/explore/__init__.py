"""Tests of searches, tours and the cluster."""
