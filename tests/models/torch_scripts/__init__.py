"""Training scripts in the style of public ones, which know nothing of Shardwright: `make` gives what
the loop of each has at hand."""
