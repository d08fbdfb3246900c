"""Runs of whole servers whose logs are validated.

population: configurations with their clients, by a seed, and scenes. random_clients: the clients by kind.
pairs: the same of two servers. serving: such a run, judged and made smaller. live: a server over HTTP.
"""
