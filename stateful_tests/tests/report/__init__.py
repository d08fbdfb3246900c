"""What pages, explanations and drawings say of a run."""
