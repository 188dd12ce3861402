"""Saved models: a graph of nodes of which supported parts are NEFF files, the rest as it was."""
