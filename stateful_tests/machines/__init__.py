"""The operations of a server as a Hypothesis state machine: begin with server_machine.py.

What a person reads of a violation is made in `ci`; what strangers import is in `kvspec`.
"""
