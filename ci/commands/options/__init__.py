"""Options that several commands share: their declaration, their groups in `--help`, and how they are read."""
