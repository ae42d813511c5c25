"""What Python callers may hand over, and the one line that they get for what they may not."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashtrie_cli import BuildOptions, Index, build_index
from flashtrie_cli.errors import InputError, UsageError
from flashtrie_cli.keys.batch import MAX_DEPTH


class TestKeys:
    @pytest.mark.parametrize(
        "keys",
        [
            [[1, 2], (1,), range(2, 4)],
            [np.array([1, 2], np.uint16), np.array([1]), [np.uint64(2), 3]],
            (key for key in [[1, 2], [1], [2, 3]]),
            np.array([[1, 2], [1, 2], [2, 3]]),
        ],
    )
    def test_any_integers(self, tmp_path: Path, keys: Any) -> None:
        build_index(keys, str(tmp_path / "i.ft"))
        index = Index.open(str(tmp_path / "i.ft"))
        assert index.lookup([1, 2])[0] >= 0
        assert index.lookup([2, 3])[0] >= 0

    @pytest.mark.parametrize(
        ("keys", "says"),
        [
            ([[1], [1.5]], "keys:2: [1.5] is no sequence of integers"),
            ([[1], [2.0, 3]], "keys:2: "),
            ([[1], np.array([1.0])], "keys:2: "),
            ([[1], "new york"], "keys:2: 'new york' is no sequence"),
            ([[1], ["12"]], "keys:2: "),
            ([[1], 7], "keys:2: 7 is no sequence"),
            ([[1], None], "keys:2: "),
            ([[1], iter([2])], "keys:2: "),
            ([[1], [3, -1]], "keys:2: token -1 is not between 0 and 2147483647"),
            ([[1], [1 << 31]], "keys:2: token 2147483648 "),
            ([[1], [1 << 70]], "keys:2: token 1180591620717411303424 "),
            ([[1], [0] * (MAX_DEPTH + 1)], "keys: a key has more than 65,535 tokens"),
        ],
    )
    def test_what_is_no_key(self, tmp_path: Path, keys: list[Any], says: str) -> None:
        with pytest.raises(InputError) as found:
            build_index(keys, str(tmp_path / "i.ft"))
        assert str(found.value).startswith(says)
        assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module", params=["reference", "auto"])
def index(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Index:
    path = str(tmp_path_factory.mktemp("api") / "i.ft")
    build_index([[1, 2], [1], [2, 3]], path)
    return Index.open(path, engine=request.param)


class TestQuestions:
    def test_sequences(self, index: Index) -> None:
        assert index.lookup([], [0]).tolist() == []
        assert index.lookup([1, 2, 1, 9], [0, 2, 2, 3, 4]).tolist() == [1, -1, 0, -1]
        assert index.lookup(np.array([1, 1 << 40]), np.array([0, 1, 2], np.uint8)).tolist() == [0, -1]

    @pytest.mark.parametrize(
        ("tokens", "offsets", "says"),
        [
            ([1.0], None, "tokens are float64"),
            ([-1], None, "token -1 is negative"),
            ([[1, 2]], None, "tokens have 2 dimensions"),
            ([1, 2], [0.0, 1.5], "offsets are float64"),
            ([1, 2], [0, 3], "do not ascend within"),
            ([1, 2], [-1, 2], "do not ascend within"),
            ([1, 2], [0, 2, 1], "do not ascend within"),
            ([1, 2], [], "offsets"),
            ([1, 2], [[0, 2]], "do not ascend within"),
        ],
    )
    def test_what_is_no_sequence(self, index: Index, tokens: Any, offsets: Any, says: str) -> None:
        with pytest.raises(InputError, match=says):
            index.lookup(tokens, offsets)

    def test_what_is_no_prefix(self, index: Index) -> None:
        for ask in (index.prefix, index.common_prefix):
            with pytest.raises(InputError, match="2 dimensions"):
                ask([[1, 2]])
        for size in (0, -1):  # rather than no keys
            with pytest.raises(UsageError, match="hold none"):
                index.prefix([1], batch_size=size)
            with pytest.raises(UsageError, match="hold none"):
                index.keys(batch_size=size)
        assert [len(keys) for keys in index.prefix([1], batch_size=1)] == [1, 1]

    @pytest.mark.parametrize("width", [0, -1, (1 << 31) + 1, 1 << 40])
    def test_widths_of_logits(self, index: Index, width: int) -> None:
        with pytest.raises(UsageError):
            index.steps(eos=[0], vocab_size=width)

    @pytest.mark.parametrize(
        ("tokens", "logprobs", "says"),
        [
            ([[1]], [[-1.0, -2.0]], "they must agree"),
            ([1], [-1.0], "grids have 1 dimensions"),
            ([[1.0]], [[-1.0]], "tokens are float64"),
            ([[1]], [[-1]], "log-probs are int64"),
            ([[-2]], [[-1.0]], "token -2 is negative"),
            ([[[1, 1]]], [[[-1.0, np.nan]]], "query 0, step 0, slot 1"),
            ([[[1]], [[1]]], [[[-1.0]], [[1e300]]], "query 1, step 0, slot 0"),
        ],
    )
    def test_what_is_no_grid(self, index: Index, tokens: Any, logprobs: Any, says: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(InputError, match=says):
                index.search(tokens, logprobs)

    def test_doubles_beyond_float32_are_empty_slots(self, index: Index) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            results = index.search([[[1, 2], [2, 3]]], [[[-1.0, -1e300], [-1.0, -1.0]]])
        assert [hit.tokens for hit in results.hits(0)] == [(1,), (1, 2)]


def test_a_cap_above_the_machine_is_none(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("small", "huge", "beyond")]
    for path, memory in zip(paths, (1 << 28, 1 << 40, 1 << 70), strict=True):
        build_index([[1, 2], [1]], path, options=BuildOptions(memory=memory, tail="auto"))
    assert len({Path(path).read_bytes() for path in paths}) == 1
