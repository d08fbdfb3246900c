"""Trace validation: the log of a watched server becomes commands on the reference.

log_reader, line_order: a log and its lines.
validator: a log, event by event.
actions: one for each event.
log_follower: the reference that follows the server.
violated_clauses: the clause that a difference violates.
deviations: known faults.
servers: runs of whole servers that write logs.
"""
