"""A graph as programs one behind the other: groups of operators on cores, and what stays on the
host.

`placement.py` says which operators a machine's compiler leaves to the host, `groups.py` shares the
others out to cores, `pieces.py` makes the graph of each. Source: neuron-cc's command reference
(`--neuroncore-pipeline-cores`) and the NeuronCore Pipeline page.
"""
