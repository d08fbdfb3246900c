"""Trace validation: the log of a watched server becomes commands beside the reference."""
