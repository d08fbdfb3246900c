"""What runs have reached: the case of a rule that a command met, the situations that a check must reach,
and the scopes in which they were enumerated. Nothing is searched or driven here."""
