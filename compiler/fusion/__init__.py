"""Which merges and cuts of kernels pay: trial code, timed (`lower/` asks)."""
