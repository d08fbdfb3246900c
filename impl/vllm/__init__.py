"""vLLM's own scheduler and KV cache manager, loaded from a release without what a server needs besides.

`modules` says what is loaded, `engine` starts a scheduler, `runner` plays the worker of the GPU, `driver`
carries commands out and gathers facts, `system` is all of that in a process of its own.
"""
