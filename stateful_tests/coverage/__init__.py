"""Coverage of runs: the cases of rules that commands met. A scope is small enough to see every state.
Nothing is searched or driven here."""
