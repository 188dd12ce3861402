"""Compiled functions as one program: calls, what it holds in HBM, and what a program may cost."""
