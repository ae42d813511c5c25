"""The limits of a search plan, on both sides of each."""

from __future__ import annotations

from typing import Any

import pytest

from flashtrie_cli import SearchPlan
from flashtrie_cli.errors import UsageError
from flashtrie_cli.query.plan import MAX_BEAM_WIDTH

WIDEST = 1 << 20
INFINITY = float("inf")


def test_the_widest() -> None:
    assert MAX_BEAM_WIDTH == WIDEST


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("beam_width", [1, WIDEST], [0, -1, WIDEST + 1]),
        ("num_results", [None, 1, WIDEST], [0, WIDEST + 1]),
        ("alpha", [0, 1000.0], [-1e-9, 1000.1, float("nan"), INFINITY]),
        ("token_threshold", [-INFINITY, INFINITY, 0.0], [float("nan")]),
        ("sequence_threshold", [-INFINITY, INFINITY, 0.0], [float("nan")]),
        ("eos", [None, 0, (1 << 31) - 1], [-1, 1 << 31]),
    ],
)
def test_limits(name: str, inside: list[Any], outside: list[Any]) -> None:
    for value in inside:
        assert getattr(SearchPlan(**{name: value}), name) == value
    for value in outside:
        with pytest.raises(UsageError):
            SearchPlan(**{name: value})


@pytest.mark.parametrize(("beam_width", "num_results", "limit"), [(7, None, 7), (7, 3, 3), (7, 9, 9)])
def test_results_are_as_many_as_beams_unless_said(
    beam_width: int, num_results: int | None, limit: int
) -> None:
    assert SearchPlan(beam_width=beam_width, num_results=num_results).result_limit == limit
