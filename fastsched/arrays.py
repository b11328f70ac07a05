"""Arrays inside a JSON state: exact, little-endian, compressed, as text."""

import base64
import zlib

import numpy as np


def to_text(values: np.ndarray, dtype: str) -> str:
    """`values` as `dtype` (for example "<i8"), flat; `from_text` with the same dtype gives them back bit for bit."""
    return base64.b64encode(zlib.compress(np.ascontiguousarray(values, dtype).tobytes(), 1)).decode("ascii")


def from_text(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype)
