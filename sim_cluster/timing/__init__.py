"""When everything happens: the cluster loop over classes of ranks, and what a step is made of."""
