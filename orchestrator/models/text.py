"""Byte-level next-token batches from a text, the same for the same seed on every machine.

The text is a file or, by default, the help topics of the standard library's `pydoc_data`, which
every Python has. Used by the presets; a user's task may use it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.task import BatchFactory

_NUM_BYTES = 256


def load_text(data: str | None) -> bytes:
    """The bytes of `data`: a path, or "pydoc" (also None) for the help topics of the standard
    library.

    Raises: UsageError when there is no such file.
    """
    path = check_data(data)
    if path is None:
        from pydoc_data import topics

        return "\n".join(topics.topics[key] for key in sorted(topics.topics)).encode()
    return path.read_bytes()


def check_data(data: str | None, folder: Path = Path()) -> Path | None:
    """The file that `data` is, looked up in `folder`; None for "pydoc".

    Raises: UsageError when there is no such file.
    """
    if data in (None, "", "pydoc"):
        return None
    path = folder / str(data)
    if path.suffix == ".npz" or not path.is_file():
        raise UsageError("SW_DATA", f'[run] data requires a text file or "pydoc", got {data}')
    return path


def byte_batches(
    text: bytes, seq_len: int, global_batch: int, seed: int
) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches of random windows: `tokens` and `targets` [global_batch, seq_len] int32.

    Raises: UsageError when the text is shorter than one window.
    """
    data = np.frombuffer(text, np.uint8)
    if len(data) < seq_len + 1:
        raise UsageError(
            "SW_DATA", f"the text requires at least {seq_len + 1} bytes, got {len(data)}"
        )
    rng = np.random.default_rng(seed)
    window = np.arange(seq_len + 1)
    while True:
        starts = rng.integers(0, len(data) - seq_len, global_batch)
        rows = data[starts[:, None] + window].astype(np.int32)
        yield {"tokens": rows[:, :-1].copy(), "targets": rows[:, 1:].copy()}


def check_vocab(vocab_size: int) -> None:
    """That every byte is a token. Raises UsageError."""
    if vocab_size < _NUM_BYTES:
        raise UsageError(
            "SW_DATA",
            f"byte-level text requires vocab_size >= {_NUM_BYTES}, got {vocab_size}",
            hint=f"set vocab_size of the config to {_NUM_BYTES} or more",
        )


def batch_factory(seq_len: int, vocab_size: int) -> BatchFactory:
    """The `batches` of a byte-level task; the first one refuses a vocabulary below 256."""

    def batches(seed: int, global_batch: int, data: str | None) -> Iterator[Any]:
        check_vocab(vocab_size)
        return byte_batches(load_text(data), seq_len, global_batch, seed)

    return batches


def token_structs(num_samples: int, seq_len: int) -> dict[str, Any]:
    """Abstract batch of `num_samples`: `tokens` and `targets` [num_samples, seq_len] int32."""
    import jax

    struct = jax.ShapeDtypeStruct((num_samples, seq_len), np.int32)
    return {"tokens": struct, "targets": struct}
