"""What users bring as one graph: JAX functions, HLO and StableHLO, with the user's lines."""
