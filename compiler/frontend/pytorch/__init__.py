"""PyTorch as its users write it: modules, optimizers and schedulers as functions of JAX."""
