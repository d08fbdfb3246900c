"""Trace validation: the log of a watched server becomes commands beside the reference.

reader, line_order: a log and its lines. validator: a log, event by event; actions: what each event does.
beside: the reference beside the server. judging: which clause a difference violates.
deviations: known faults. servers: runs of whole servers that write such logs.
"""
