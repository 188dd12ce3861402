"""From a graph to NEFF files for one logical NeuronCore, and how long they take on it."""
