"""A release's radix tree with its host tier, a storage behind it, and a server that only decodes or prefills:
tree, cache controller, host pools, allocators, threads and queues are its own. Ours are the device that
copies KV, the assembler, which makes host pools without memory, the backend of the storage, and the other
server."""
