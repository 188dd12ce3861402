"""Which merges and cuts of kernels pay: an autotuner times their code (`lower/` asks)."""
