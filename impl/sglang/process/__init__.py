"""A release in a worker process, and what is said to it. Only the worker's side imports torch."""
