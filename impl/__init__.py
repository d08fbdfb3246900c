"""What is tested: the adapter that every system offers, and the systems behind it.

Takes from `reference` only the vocabulary (geometry, commands, outcomes), never its rules.
"""
