"""LMDeploy's PyTorch engine: its scheduler, block managers, block trie and the maker of its batches.

Full attention and windows, recurrent state with its checkpoints, prefix sharing, chunked prompts, preemption;
steps overlap as LMDeploy's do. The worker and the clients are played.
"""
