"""Reference and system at each step of a run as data, and where they differ. Nothing is judged or drawn
here."""
