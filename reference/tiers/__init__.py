"""A second tier: host memory that KV is copied to and loaded from, and the transfers between.

config, commands, facts: of a radix tree with a host tier, which is driven command by command (SGLang).
clauses: what must hold of any second tier, also of vLLM's connector.
step: a command, with what the clauses ask about it (slot_owners, host_records, leaks, sent_parts).
"""
