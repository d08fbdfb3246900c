"""Proofs for all integers: the reference's own code, run on unknown integers, and z3. No rule is written
down a second time here."""
