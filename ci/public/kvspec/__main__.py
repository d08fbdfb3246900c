"""`python -m kvspec` is the command `kvspec`."""

from ci.cli import main

main()
