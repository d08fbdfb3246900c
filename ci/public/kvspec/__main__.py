"""`python -m kvspec` is the command `kvspec`."""

from ci.cli import main

if __name__ == "__main__":
    main()
