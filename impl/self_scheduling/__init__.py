"""Adapters of engines that schedule by themselves share these files.

driver: a driver without `reset`, `carry_out` and `view`.
toy_model: the model that it plays.
request_sources: the sources of requests' KV, kept beside the engine.
release_system: a release in a worker, from its wheel or from a checkout.
"""
