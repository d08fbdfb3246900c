"""The systems under test, and the adapter that each of them offers.

Takes from `reference` only the vocabulary (geometry, commands, outcomes), never its rules.
"""

from pathlib import Path

# The folder that this package is imported from: a checkout, or, where it is `kvspec.impl`, site-packages.
HOME = Path(__file__).resolve().parents[1 + __name__.count(".")]
