"""The surroundings of a release's bookkeeping: its files, their source, stand-ins for the rest."""
