"""Elements of tensors as text that gives back every bit.

A float is the shortest decimal number that rounds to it in its own type, or `inf` or `nan`; any
other pattern (a NaN that carries something) is `bits<0x...>`, the highest bit first. Long rows of
elements are `dense<0x...>`, bytes in the order of memory.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.text.lexer import Cursor, Token

_DIGITS = 17  # decimal digits that tell any two fp64 numbers apart (IEEE 754)


def bits_text(data: bytes) -> str:
    """The pattern of one little-endian element, highest bit first."""
    return f"bits<0x{data[::-1].hex().upper()}>"


def read_bits(cursor: Cursor, num_bytes: int) -> bytes:
    """The element behind the word `bits`. Raises UsageError for another width."""
    cursor.expect("<")
    token = cursor.take("hex", "a pattern like 0x7FC00001")
    if len(token.text) != 2 + 2 * num_bytes:
        raise cursor.error(f"{2 * num_bytes} hexadecimal digits", token)
    cursor.expect(">")
    return bytes.fromhex(token.text[2:])[::-1]


@lru_cache(maxsize=4096)
def element_text(data: bytes, dtype: DType) -> str:
    """One element of `dtype`, from its bytes in memory."""
    value = np.frombuffer(data, dtype.numpy)[0]
    if dtype is DType.PRED:
        return {b"\0": "false", b"\1": "true"}.get(data) or bits_text(data)
    if not dtype.is_float:
        return str(int(value))
    number = float(value)
    for digits in range(1, _DIGITS + 1):
        near = float(f"{number:.{digits}g}")
        if _encoded(near, dtype) == data:
            return repr(near)
    return bits_text(data)


def _encoded(number: float, dtype: DType) -> bytes:
    with np.errstate(over="ignore", invalid="ignore"):
        return bytes(np.asarray(number).astype(dtype.numpy).tobytes())


def read_element(cursor: Cursor, dtype: DType) -> bytes:
    """The bytes of the element that stands next. Raises UsageError when it is none of `dtype`."""
    token = cursor.next()
    if token.kind == "word" and token.text == "bits":
        return read_bits(cursor, dtype.bytes)
    if dtype is DType.PRED:
        if token.text not in ("true", "false"):
            raise cursor.error("true or false", token)
        return bytes([token.text == "true"])
    if dtype.is_float:
        return _float(cursor, token, dtype)
    info = np.iinfo(dtype.numpy)
    if token.kind != "int" or not info.min <= cursor.integer("a number", token) <= info.max:
        raise cursor.error(f"an element of {dtype.value}", token)
    return np.asarray(int(token.text), dtype.numpy).tobytes()


def _float(cursor: Cursor, token: Token, dtype: DType) -> bytes:
    if token.kind not in ("int", "float") and token.text not in ("inf", "nan"):
        raise cursor.error(f"an element of {dtype.value}", token)
    number = float(token.text)
    data = _encoded(number, dtype)
    held = float(np.frombuffer(data, dtype.numpy)[0])
    if (math.isinf(number), math.isnan(number)) != (math.isinf(held), math.isnan(held)):
        raise cursor.error(f"an element in the range of {dtype.value}", token)
    return data
