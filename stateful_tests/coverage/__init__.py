"""Coverage of runs: the case of a rule that a command met; and scopes, small enough to see every state.
Nothing is searched or driven here."""
