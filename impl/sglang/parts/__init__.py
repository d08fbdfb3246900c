"""What a release's bookkeeping runs in: which of its files, where they come from, stand-ins for the rest."""
