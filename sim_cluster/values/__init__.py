"""What programs compute, rank by rank: memories, functions and regions as whole arrays (L1)."""
