"""The operations of a server as a Hypothesis state machine, and the run that finds a violation with it.

What a person reads of a violation is made in `ci`; what strangers import is in `kvspec`.
"""
