"""Two whole schedulers of a release in one process, prefill and decode: the release's own event loops,
Mooncake manager, sender and receiver. Network, clock and threads are stand-ins, and what they do is data."""
