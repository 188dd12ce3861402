"""PyTorch as its users write it: modules, losses, optimizers and schedules as a training step.

`torch.export` gives the graph of ATen operators (`exporting.py`), `operators/` has one JAX function
per operator, `interpreter.py` calls them at the user's lines. torch is imported by functions that
are given something of torch's, never by a module of ours.
"""
