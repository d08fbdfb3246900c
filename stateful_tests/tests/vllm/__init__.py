"""vLLM's releases: loading, driving, what the clauses see."""
