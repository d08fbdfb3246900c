"""SPEC.md, made from the code. Prose stands in the template, facts in the code that they are about."""
