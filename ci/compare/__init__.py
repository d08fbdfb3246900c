"""Both sides of a run as plain data: snapshots, differences, the ledger. No sentences of explanation, no output."""
