"""Pinned memory that answers arrive in, and that whoever asked then owns through numpy: no copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine.cuda_pinned import pinned

_ROUNDING = 1 << 16
_ROOMY = 4
"""A free slab of up to so many times what is asked for will do."""

LENT_SLABS = 2
"""Answers of one engine that callers may hold in pinned memory; more are copied. Pinning memory takes ten times as long
as copying to it, so a caller who keeps them all is better off with copies, and one who lets them go needs no more."""


class Slab:
    """Pinned memory on loan: back in its pool when it and every array over it are gone.

    ``address``: of its first byte, the same for the device.
    """

    def __init__(self, pool: SlabPool, memory: npt.NDArray[np.uint8]):
        self._pool, self._memory = pool, memory
        self.__array_interface__ = memory.__array_interface__
        self.address = int(memory.__array_interface__["data"][0])
        pool.num_lent += 1

    def __del__(self) -> None:
        self._pool.num_lent -= 1
        self._pool.free.append(self._memory)


class SlabPool:
    """Lends slabs, and keeps those that came back."""

    def __init__(self) -> None:
        self.free: list[npt.NDArray[np.uint8]] = []
        self.num_lent = 0

    def take(self, num_bytes: int) -> Slab:
        """A slab of at least so many bytes. EngineUnavailable where no memory can be pinned."""
        suiting = [
            memory for memory in self.free if num_bytes <= memory.nbytes <= _ROOMY * num_bytes + _ROUNDING
        ]
        if suiting:
            best = min(suiting, key=lambda memory: memory.nbytes)
            self.free = [memory for memory in self.free if memory is not best]
            return Slab(self, best)
        self.free.clear()  # whoever asks for another size asks for it again
        memory, _ = pinned(-(-num_bytes // _ROUNDING) * _ROUNDING, np.uint8)
        return Slab(self, memory)


class SlabParts:
    """Arrays laid out one behind the other in one piece of memory. ``add`` them all first."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[int, int, np.dtype[Any]]] = {}
        self.num_bytes = 0

    def add(self, name: str, length: int, dtype: Any) -> None:
        kind = np.dtype(dtype)
        self._parts[name] = self.num_bytes, length, kind
        self.num_bytes += -(-length * kind.itemsize // 256) * 256

    def arrays(self, memory: Any) -> dict[str, npt.NDArray[Any]]:
        """The arrays in a slab, which they keep from its pool, or in an array of bytes."""
        whole = np.asarray(memory)
        return {
            name: whole[at : at + length * kind.itemsize].view(kind)
            for name, (at, length, kind) in self._parts.items()
        }

    def addresses(self, begin: int) -> dict[str, int]:
        """Where they lie in memory that begins there."""
        return {name: begin + at for name, (at, _, _) in self._parts.items()}
