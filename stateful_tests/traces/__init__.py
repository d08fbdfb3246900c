"""Traces as files, in the notation that people type, and as they are recorded.

No system is driven here, and nothing is judged: `lockstep` decides whether a trace conforms.
"""
