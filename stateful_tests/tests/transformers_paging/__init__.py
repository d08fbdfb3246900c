"""transformers' continuous batching."""
