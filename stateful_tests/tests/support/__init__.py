"""What tests of several rooms share: planted faults, mutants, helpers. No tests."""
