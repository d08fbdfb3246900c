"""The next command of a random run: what is enabled in a state, with which arguments, how often. It sees
the reference's state alone, never the system that is driven."""
