"""Streams and events of the emulated machine: what is enqueued runs later, in any order that the driver would allow.

Nothing runs when it is asked for. Each look at an event runs one piece of work, of a stream drawn by lot among those
that may go on; so whoever reads an answer, or writes over a buffer, before an event or a stream says that it may, is
found out.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from emulated_pycuda import NAMES, EmulatedDriver

from flashtrie_cli.engine.cuda_layout import BATCH, PACKED

NOT_READY, WORD, POINTER, SIZE = 600, ctypes.c_uint, ctypes.c_void_p, ctypes.c_size_t
_handles = itertools.count(1)


class Handle:
    """In the place of a stream or an event of the driver's own."""

    def __init__(self, **_: bool):
        self.handle = next(_handles)


class EmulatedStreams:
    """The driver's functions that a native batch calls.

    ``error``: what went wrong in here.
    """

    def __init__(self, driver: EmulatedDriver, seed: int = 1):
        self._driver, self._lot = driver, random.Random(seed)
        self._work: dict[int, deque[tuple[Callable[[], bool], Callable[[], None]]]] = {}
        self._asked: dict[int, int] = {}  # by event: how often it was recorded, and how often reached
        self._reached: dict[int, int] = {}
        self._failing: dict[str, tuple[int, int]] = {}
        self.error: Exception | None = None
        code = ctypes.c_int
        launch = ctypes.CFUNCTYPE(code, POINTER, *[WORD] * 7, POINTER, ctypes.POINTER(POINTER), POINTER)
        two, one = ctypes.CFUNCTYPE(code, POINTER, POINTER), ctypes.CFUNCTYPE(code, POINTER)
        self._functions = (
            launch(self._guarded("launch", self._launch)),
            two(self._guarded("record", self._record)),
            one(self._guarded("query", self._query)),
            ctypes.CFUNCTYPE(code, POINTER, POINTER, WORD)(self._guarded("wait", self._wait)),
            ctypes.CFUNCTYPE(code, ctypes.c_uint64, POINTER, SIZE, POINTER)(
                self._guarded("upload", self._copy)
            ),
            ctypes.CFUNCTYPE(code, POINTER, ctypes.c_uint64, SIZE, POINTER)(
                self._guarded("download", self._copy)
            ),
            one(self._guarded("synchronize", self._synchronize)),
        )

    def addresses(self) -> list[int]:
        return [int(ctypes.cast(function, POINTER).value or 0) for function in self._functions]

    def stalled_addresses(self) -> list[int]:
        """The same, where no event is ever reached; by a function in C, since one in Python would hear of signals."""
        never = ctypes.cast(self._driver.library.query_stream, POINTER).value or 0
        return [*self.addresses()[:2], int(never), *self.addresses()[3:]]

    def draw_by(self, seed: int) -> None:
        """Another order of the same work."""
        self._lot = random.Random(seed)

    def fail(self, call: str, code: int, after: int) -> None:
        """Let a call of this name return a code, after so many that return none."""
        self._failing[call] = code, after

    def _guarded(self, name: str, call: Callable[..., int]) -> Callable[..., int]:
        def guarded(*arguments: Any) -> int:
            code, after = self._failing.pop(name, (0, 0))
            if after:
                self._failing[name] = code, after - 1
            elif code:
                return code
            try:
                return call(*arguments)
            except Exception as error:  # ctypes would only print it
                self.error = error
                return 999

        return guarded

    def _enqueue(
        self, stream: int, work: Callable[[], None], ready: Callable[[], bool] = lambda: True
    ) -> int:
        self._work.setdefault(stream, deque()).append((ready, work))
        return 0

    def _launch(self, function: int, blocks: int, *rest: Any) -> int:
        _, _, threads, _, _, shared, stream, parameters, _ = rest
        name = NAMES[function - 1]
        sizes = (BATCH.itemsize, PACKED.itemsize)[: 2 if name == "pack_hits" else 1]
        arguments = tuple(ctypes.string_at(parameters[i], size) for i, size in enumerate(sizes))
        return self._enqueue(stream, lambda: self._driver.launch(name, blocks, threads, shared, arguments))

    def _copy(self, to: int, source: int, num_bytes: int, stream: int) -> int:
        return self._enqueue(stream, lambda: ctypes.memmove(to, source, num_bytes))

    def _record(self, event: int, stream: int) -> int:
        number = self._asked[event] = self._asked.get(event, 0) + 1

        def reach() -> None:
            self._reached[event] = number

        return self._enqueue(stream, reach)

    def _wait(self, stream: int, event: int, flags: int) -> int:
        number = self._asked.get(event, 0)
        return self._enqueue(stream, lambda: None, lambda: self._reached.get(event, 0) >= number)

    def _query(self, event: int) -> int:
        self._run_one()
        return 0 if self._reached.get(event, 0) >= self._asked.get(event, 0) else NOT_READY

    def _synchronize(self, stream: int) -> int:
        while self._work.get(stream):
            self._run_one()
        return 0

    def _run_one(self) -> None:
        ready = [stream for stream, work in self._work.items() if work and work[0][0]()]
        if not ready:
            assert self.is_idle, "streams that wait for each other"
            return
        stream = self._lot.choice(ready)
        self._work[stream].popleft()[1]()

    @property
    def is_idle(self) -> bool:
        return not any(self._work.values())
