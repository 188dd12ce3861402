"""Which dims of a step walk together: indices of the model, its layers, and what splits them."""
