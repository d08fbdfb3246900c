"""One command on system and reference side by side: views become facts, facts meet the clauses, a run
becomes data. Nothing here chooses commands, reads files or prints."""
