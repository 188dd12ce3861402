"""Overlap of communication with layers: collectives move across the boundaries of layers.

`layers.py` rewrites the programs of a step after the cut, so that strategies and partitioning know
nothing of it: `groups.py` makes one iteration of several layers, `buckets.py` one collective of
several, `assign.py` decides which ops of a layer loop run early or late, `pipelined.py` makes a
software pipeline of the loop, `streams.py` says what runs beside what, and lets what a layer waits
for go first. Values stay the same bit by bit. `deferred.py` comes before the cut: it frees
reductions of gradients from loops, so that they can wait for the last micro-batch, whose backward
program `ends.py` makes.
"""
