"""Runs of whole servers whose logs are validated.

population: configurations with their clients, by a seed, and scenes. random_clients: the clients by kind.
server_pairs: runs of two servers. scheduler_runs: one run, judged and minimised. served_run: a run as a file,
and smaller ones. live_server: a server over HTTP.
"""
