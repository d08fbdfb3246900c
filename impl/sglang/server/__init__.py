"""Whole SGLang servers: the environment that one needs, the release's own scheduler, and the watcher in it."""
