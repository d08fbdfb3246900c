"""Commands as the release's own scheduler carries them out. Memory is moved by the release's code alone."""
