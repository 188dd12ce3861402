"""The network of a run, and what collectives cost on it."""
