"""A release's radix tree with its host tier: tree, cache controller, host pools and allocators are its own.
Ours are the device that copies KV, and the assembler, which makes host pools without memory."""
