"""Tests of watching whole servers: the watcher, its logs, and their validation."""
