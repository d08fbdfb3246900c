"""All that differs between releases, a class each. Nothing else asks for a version."""
