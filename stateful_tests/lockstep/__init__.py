"""One command on system and reference side by side: views become facts, and clauses check the facts.

A run becomes data. Nothing here chooses commands, reads files or prints.
"""
