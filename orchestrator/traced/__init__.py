"""PyTorch modules that run on the simulator: traced, in parts where not all is compiled, saved."""
