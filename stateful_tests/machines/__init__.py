"""The front door for Hypothesis and pytest: state machines, the plugin with its options. Whatever they
find is found by `lockstep` and made small by `shrink`."""
