"""Commands drawn from the reference's state, never from a system: run profiles, enabled commands, arguments.

No command runs here.
"""
