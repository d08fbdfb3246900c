"""A pair: a prefill server, a decode server, and the network between them, judged as one system.

`config`, `commands` and `facts` are the vocabulary. `pair_record` follows what the environment did: texts,
leases, failures. `step` is one command with what clauses ask about it; `clauses` has those of a pair (PD).
Each server alone is an engine that schedules by itself, so the clauses of `reference.blocks` judge it
unchanged.
"""
