"""A release in a worker process (impl.process), of which only the worker's side imports torch; its tests in another."""
