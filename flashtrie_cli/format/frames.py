"""Frames: pieces of a section, each compressed by itself, so that they pack and unpack in parallel."""

from __future__ import annotations

import numpy as np


def shuffle(data: bytes | bytearray | memoryview, element_size: int) -> bytes:
    """Gather the first bytes of all elements, then the second ones, and so on; a ragged rest stays at the end."""
    if element_size <= 1:
        return bytes(data)
    array = np.frombuffer(data, np.uint8)
    whole = len(array) // element_size * element_size
    planes = array[:whole].reshape(-1, element_size).T
    return planes.tobytes() + array[whole:].tobytes()


def unshuffle_into(data: bytes, element_size: int, target: np.ndarray) -> None:
    """Inverse of ``shuffle``; ``target`` uint8 [len(data)]."""
    array = np.frombuffer(data, np.uint8)
    if element_size <= 1:
        target[:] = array
        return
    whole = len(array) // element_size * element_size
    target[:whole].reshape(-1, element_size)[:] = array[:whole].reshape(element_size, -1).T
    target[whole:] = array[whole:]
