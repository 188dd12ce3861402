"""Function graphs to kernels. Importing the package registers the lowering of every op family by
name.
"""

from shardwright.compiler.lower import collective, dot, elementwise, gather, host, reduce, shape

__all__ = ["collective", "dot", "elementwise", "gather", "host", "reduce", "shape"]
