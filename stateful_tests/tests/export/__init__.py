"""Exported tests and bug reports."""
