"""The continuous batching of Hugging Face's transformers: its scheduler, paged cache and batch processor.

Full attention and windows (rings), prefix sharing, forks, soft resets, host memory; a model of one layer for
each group.
"""
