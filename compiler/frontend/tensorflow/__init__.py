"""TensorFlow: SavedModels, Keras models and functions, traced in a process of their own to HLO."""
