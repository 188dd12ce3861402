"""The process that loads TensorFlow: requests in, traced programs out.

What the user's code prints goes where the child's errors go. A request is an `asking.Asked`.
"""

from __future__ import annotations

import os
from typing import Any

import msgpack

from shardwright.compiler.frontend.isolated import error_answer
from shardwright.compiler.frontend.tensorflow.asking import Asked
from shardwright.compiler.frontend.tensorflow.start import split_name
from shardwright.compiler.frontend.user_code import called
from shardwright.compiler.support.child import serve

SEED = 0
"""Of what a model's code draws where it says no seed (our choice): every child makes one model."""
_FOUND: dict[tuple[str, bool], Any] = {}


def _answer(row: dict[str, Any]) -> dict[str, Any]:
    try:
        with called("loading TensorFlow"):
            import tensorflow as tf

            from shardwright.compiler.frontend.tensorflow.models import find
            from shardwright.compiler.frontend.tensorflow.tracing import traced

        asked = Asked(**row)
        key = asked.model, asked.training
        if key not in _FOUND:  # a model that is made anew has other names
            tf.keras.utils.set_random_seed(SEED)
            _FOUND[key] = find(*split_name(asked.model), asked.training)
        found = _FOUND[key]
        return {"program": traced(asked, found).written()}
    except (Exception, SystemExit) as error:
        return error_answer(error)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    serve(lambda request: bytes(msgpack.packb(_answer(msgpack.unpackb(request)))))
