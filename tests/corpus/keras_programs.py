"""Programs of `programs.toml` that Keras has, with JAX as its backend: a loss of the trained
variables, and its gradient. Dropout draws from a seed that is an argument, as `fit` carries it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

N, TIME, VOCAB, WIDTH = 4, 10, 29, 16
RNG = np.random.default_rng(23)
Built = tuple[Callable[..., Any], tuple[Any, ...]]
KERAS: dict[str, Callable[[], Built]] = {}


def library() -> Any:
    """keras over JAX; which backend it has is decided when it is imported."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    return keras


def program(build: Callable[[], Built]) -> Callable[[], Built]:
    """Enter a program under the name of its function, as value and gradient."""
    import jax

    def built() -> Built:
        loss, arguments = build()
        return jax.value_and_grad(loss, has_aux=True), arguments

    KERAS[build.__name__] = built
    return build


def classified(model: Any, x: np.ndarray, classes: int) -> Built:
    """Cross entropy of a model by `stateless_call`, with what its other variables become."""
    keras = library()
    labels = RNG.integers(0, classes, N).astype(np.int32)
    entropy = keras.losses.SparseCategoricalCrossentropy()

    def loss(trained: Any, others: Any, x: Any, labels: Any) -> Any:
        outputs, after = model.stateless_call(trained, others, x, training=True)
        return entropy(labels, outputs), after

    model(x)
    trained, others = (
        [np.asarray(v) for v in variables]
        for variables in (model.trainable_variables, model.non_trainable_variables)
    )
    return loss, (trained, others, x, labels)


@program
def keras_mnist_convnet() -> Built:
    layers = library().layers
    model = library().Sequential(
        [
            layers.Conv2D(8, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(8, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(10, activation="softmax"),
        ]
    )
    return classified(model, RNG.normal(size=(N, 14, 14, 1)).astype(np.float32), 10)


@program
def keras_imdb_lstm() -> Built:
    layers = library().layers
    model = library().Sequential(
        [
            layers.Embedding(VOCAB, WIDTH),
            layers.Bidirectional(layers.LSTM(8, return_sequences=True)),
            layers.Bidirectional(layers.LSTM(8)),
            layers.Dense(2, activation="softmax"),
        ]
    )
    return classified(model, RNG.integers(0, VOCAB, (N, TIME)).astype(np.int32), 2)


@program
def keras_text_transformer() -> Built:
    keras = library()
    layers = keras.layers
    tokens = keras.Input((TIME,), dtype="int32")
    places = keras.ops.arange(TIME)
    x = layers.Embedding(VOCAB, WIDTH)(tokens) + layers.Embedding(TIME, WIDTH)(places)
    y = layers.MultiHeadAttention(2, 8, dropout=0.1)(x, x)
    x = layers.LayerNormalization(epsilon=1e-6)(x + layers.Dropout(0.1)(y))
    y = layers.Dense(WIDTH)(layers.Dense(32, activation="relu")(x))
    x = layers.LayerNormalization(epsilon=1e-6)(x + layers.Dropout(0.1)(y))
    x = layers.Dropout(0.1)(layers.GlobalAveragePooling1D()(x))
    model = keras.Model(tokens, layers.Dense(2, activation="softmax")(x))
    return classified(model, RNG.integers(0, VOCAB, (N, TIME)).astype(np.int32), 2)


@program
def keras_vae() -> Built:
    """A convolutional encoder, a draw, and a decoder of transposed convolutions."""
    keras = library()
    layers, ops = keras.layers, keras.ops
    picture = keras.Input((8, 8, 1))
    x = layers.Conv2D(8, 3, activation="relu", strides=2, padding="same")(picture)
    x = layers.Dense(16, activation="relu")(layers.Flatten()(x))
    encoder = keras.Model(picture, [layers.Dense(2)(x), layers.Dense(2)(x)])
    code = keras.Input((2,))
    x = layers.Reshape((4, 4, 8))(layers.Dense(4 * 4 * 8, activation="relu")(code))
    x = layers.Conv2DTranspose(8, 3, activation="relu", strides=2, padding="same")(x)
    decoder = keras.Model(code, layers.Conv2DTranspose(1, 3, padding="same")(x))
    x = RNG.uniform(size=(N, 8, 8, 1)).astype(np.float32)
    count = len(encoder.trainable_variables)

    def loss(trained: Any, x: Any, seed: Any) -> Any:
        import jax

        (mean, logvar), _ = encoder.stateless_call(trained[:count], [], x)
        noise = jax.random.normal(jax.random.key(seed), mean.shape)
        made, _ = decoder.stateless_call(trained[count:], [], mean + ops.exp(0.5 * logvar) * noise)
        entropy = keras.losses.binary_crossentropy(x, made, from_logits=True)
        kl = -0.5 * (1 + logvar - ops.square(mean) - ops.exp(logvar))
        return ops.mean(ops.sum(entropy, axis=(1, 2))) + ops.mean(ops.sum(kl, axis=1)), made

    trained = [np.asarray(v) for v in encoder.trainable_variables + decoder.trainable_variables]
    return loss, (trained, x, np.int32(5))
