"""PyTorch as its users write it: modules, and how their code distributes them."""
