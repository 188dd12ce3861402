"""What programs compute, rank by rank: memories, functions and kernels as whole arrays (L1)."""
