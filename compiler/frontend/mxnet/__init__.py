"""MXNet models: a symbol's JSON and its parameters, each operator a function on JAX arrays."""
