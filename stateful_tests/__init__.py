"""How systems are driven beside the reference and compared with it. Each folder is a room; a room imports
only from the floors below it (pyproject.toml has the layers)."""
