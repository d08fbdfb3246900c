"""HTML pages of replayed traces: the page of the row model, and one for each other kind of system."""
