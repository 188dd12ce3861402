"""ONNX models: read from their bytes, each operator a function on JAX arrays."""
