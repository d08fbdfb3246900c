"""The commands of `kvspec`, a module for each kind of work."""
