"""The instruction set: programs, kernels, limits, costs, and what makes code legal."""
