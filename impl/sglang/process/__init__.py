"""A release in a worker process (impl.process), of which only the worker imports torch; its tests in one."""
