"""What pages, `because` and drawings say of a run."""
