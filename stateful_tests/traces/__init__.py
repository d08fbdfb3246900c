"""Traces as files, as text that people type, and as they are recorded. No system is driven here, and
nothing is judged: that a trace conforms is for `lockstep` to say."""
