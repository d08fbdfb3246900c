"""A system in a worker process: what the two say to each other, and how the worker ends. A crash, an exit, a
hang or too much memory is an answer then (Broken), not the end of the check."""
