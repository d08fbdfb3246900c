"""Proofs by z3 that the arithmetic of the reference is right for all lengths, pages and windows.

What is proved is the reference's own text. What is random, exhaustive or about a system lives elsewhere.
"""
