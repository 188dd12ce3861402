"""Rules by how ops treat dims: alike (`regular`), folding, moving, looking up, exchanging."""
