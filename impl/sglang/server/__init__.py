"""Whole SGLang servers: their environment, a release's own scheduler in it, and the watcher."""
