"""LMDeploy's PyTorch engine, driven."""
