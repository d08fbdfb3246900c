"""The smallest trace that still violates its clause. What fails is asked of a function; nothing here knows
why."""
