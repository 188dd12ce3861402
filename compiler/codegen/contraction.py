def emit_contraction(*a): raise NotImplementedError
