"""Items made ahead of time, on a thread of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from flashtrie_cli.inputs.ahead import read_ahead


def test_the_same_items_in_the_same_order() -> None:
    assert list(read_ahead(range(1000))) == list(range(1000))
    assert list(read_ahead([])) == []
    assert list(read_ahead([None, None])) == [None, None]


def test_the_next_ones_are_made_meanwhile() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(9):
            made.append(number)
            yield number

    ahead = read_ahead(items(), most=2)
    assert next(ahead) == 0
    deadline = time.monotonic() + 10
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert made == [0, 1, 2, 3]  # one in hand, two in the queue, one at the door
    ahead.close()
    assert len(made) == 4


def test_an_error_comes_where_it_would_have_come() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("the third")

    ahead = read_ahead(items())
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(ValueError, match="the third"):
        next(ahead)
    assert not [thread for thread in threading.enumerate() if thread.name == "read-ahead"]
