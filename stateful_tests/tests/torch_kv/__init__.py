"""Tests of the built-in implementation and its named bugs."""
