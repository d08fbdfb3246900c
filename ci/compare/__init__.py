"""Both sides of a run as plain data: snapshots, differences, the ledger. No
explanations and no output."""
