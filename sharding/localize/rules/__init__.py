"""One file per family of ops, under the same names as `compiler/ir/ops`."""
