"""Which merges and cuts of regions pay: trial code, timed (`lower/` asks)."""
