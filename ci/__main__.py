"""`python -m ci` is `kvspec`, for a checkout that is not installed."""

from ci.cli import main

if __name__ == "__main__":
    main()
