"""The smallest trace that still violates its clause. The caller passes the predicate."""
