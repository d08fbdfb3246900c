"""Tests of real releases of SGLang."""
