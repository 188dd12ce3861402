"""One pass on one text: the registry of graph rewrites and the verb `opt`."""
