"""Triton model repositories: a NEFF or a traced module that Triton's Python backend serves."""
