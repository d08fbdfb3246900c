"""A system and the reference side by side, every clause asked after each command. Nothing here chooses what
to do next, searches or prints."""
