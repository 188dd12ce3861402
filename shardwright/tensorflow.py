"""SavedModels whose supported parts are NEFF files: importing this lets TensorFlow run them.

    import tensorflow as tf
    import shardwright.tensorflow
    model = tf.saved_model.load("saved").signatures["serving_default"]

`shardwright.saved.compile` writes them.
"""

from __future__ import annotations

from shardwright.orchestrator.saved.tensorflow_model import start

start()
