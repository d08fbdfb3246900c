"""Adapters of strangers: the example engines, faults in these, and adapters that misbehave."""
