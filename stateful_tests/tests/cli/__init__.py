"""Tests of the command line, reports and exports."""
