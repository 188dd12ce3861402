"""What a user of neuronx-cc sees, as data: releases, command-line flags, operators.

The command, `NEURON_CC_FLAGS` and the operator checks of the importer read the same tables, so that
a fact of a release is written once. Nothing here compiles anything.
"""
