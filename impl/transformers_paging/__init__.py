"""The continuous batching of Hugging Face's transformers: its scheduler, paged cache and batch processor.

Full attention, prefix sharing, soft resets; one model of one layer. What it takes beside the release is the
measure of what a third engine costs: these two modules.
"""
