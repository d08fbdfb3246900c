"""The specification: the vocabulary, the rules and the clauses of KV-cache bookkeeping.

Pure Python on the standard library. Nothing here knows a slot id, a tensor or a test.
"""
