"""Partitioning by Shardy: a mesh, where values lie on it, and the partitioned graph."""
