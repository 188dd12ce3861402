"""Model families in JAX, and the training tasks of presets and of `config.json` files."""
