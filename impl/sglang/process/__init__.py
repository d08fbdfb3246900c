"""A release in a worker process (impl.process): only the worker's side imports torch. And exported tests in one."""
