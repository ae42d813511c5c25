"""Reading ahead: the next items are made on a thread of their own while the last one is worked on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable
from typing import TypeVar

Item = TypeVar("Item")

_END = object()


def read_ahead(items: Iterable[Item], *, most: int = 2) -> Generator[Item, None, None]:
    """The same items in the same order, up to ``most`` of them made before they are asked for.

    An exception of theirs comes where it would have come. Closed early, it waits for the item under way and makes no
    more. For items whose making leaves the interpreter free: reading files, checksums, numpy.
    """
    ready: queue.Queue[tuple[object, BaseException | None]] = queue.Queue(most)
    stopped = threading.Event()

    def put(item: object, error: BaseException | None = None) -> None:
        while not stopped.is_set():
            try:
                return ready.put((item, error), timeout=0.1)
            except queue.Full:
                continue

    def make() -> None:
        try:
            for item in items:
                put(item)
                if stopped.is_set():
                    return
            put(_END)
        except BaseException as error:  # everything is the caller's business, whatever it is
            put(_END, error)

    thread = threading.Thread(target=make, name="read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item  # type: ignore[misc]
    finally:
        stopped.set()
        thread.join()
