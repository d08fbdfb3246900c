"""What a user types and sees, as text: each file is one conversation with the command line.

`pytest stateful_tests/tests/transcripts --accept` writes what the commands print now. Read the diff before
you commit it. The grammar of a file stands in `test_transcripts.py`.
"""
