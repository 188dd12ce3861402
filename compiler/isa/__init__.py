"""The instruction set: programs, regions, limits, costs, and what makes code legal."""
