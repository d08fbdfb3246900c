"""What tests of several rooms share. No tests."""
