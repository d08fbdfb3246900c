"""Commands drawn from the reference's state, never from a system: run profiles, what is enabled, arguments.

No command is run here.
"""
