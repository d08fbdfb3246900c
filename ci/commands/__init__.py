"""The commands of `kvspec`, a module for each kind of work: options, unusable input, exit codes. What a
command does is done by the room behind it, and imported when it runs."""
