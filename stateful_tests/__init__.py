"""How systems are driven and compared: generation, lockstep, shrinking, machines and the tests."""
