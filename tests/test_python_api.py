"""What Python callers may hand over, and the one line that they get for what they may not."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashtrie_cli
from flashtrie_cli import BuildOptions, Index, SearchPlan, build_index
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

    def test_sequences_of_several_lengths(self, index: Index) -> None:
        with pytest.raises(InputError, match="with offsets"):
            index.lookup([[1, 2], [1]])

    @pytest.mark.parametrize(
        ("key_ids", "error"), [([0.5], InputError), ([-1], IndexError), ([3], IndexError)]
    )
    def test_what_is_no_key_id(self, index: Index, key_ids: Any, error: type[Exception]) -> None:
        with pytest.raises(error):
            index.key_tokens(key_ids)
        assert index.key_tokens([]).tokens.tolist() == []
        assert index.key_tokens([2, 0]).tokens.tolist() == [2, 3, 1]

    def test_states_and_tokens_of_steps(self, index: Index) -> None:
        steps = index.steps(eos=[9], vocab_size=10)
        for states in ([0.5], [-1], [1 << 32], ["0"]):
            with pytest.raises(InputError, match="states are"):
                steps.children(states)
            with pytest.raises(InputError, match="states are"):
                steps.advance(states, [1])
        with pytest.raises(InputError, match="tokens are float64"):
            steps.advance([0], [1.5])
        with pytest.raises(InputError, match="differ in length"):
            steps.walk([[1], [1, 2]])
        with pytest.raises(UsageError, match="id -9 is negative"):
            index.steps(eos=[-9])
        states = np.zeros(1, np.uint32)
        assert steps.advance(states, [1])[0].tolist() != [0]
        assert states.tolist() == [0]  # the caller's stay

    def test_what_is_no_plan(self, index: Index) -> None:
        grid = [[[1]]], [[[-1.0]]]
        for options in (
            {"beam_width": "3"},
            {"beam_width": 2.5},
            {"num_results": 1.0},
            {"alpha": None},
            {"eos": "x"},
        ):
            with pytest.raises(UsageError, match=next(iter(options))):
                index.search(*grid, **options)
        with pytest.raises(UsageError, match="into the plan"):  # rather than one of the two in silence
            index.search(*grid, SearchPlan(), beam_width=3)

    def test_hits_of_no_query(self, index: Index) -> None:
        results = index.search([[[1]]], [[[-1.0]]], beam_width=np.int64(2))
        for query in (-1, 1):
            with pytest.raises(IndexError, match="is not one of 1"):
                results.hits(query)

    def test_an_index_says_what_it_is(self, index: Index) -> None:
        assert "3 keys" in repr(index)
        with pytest.raises(TypeError, match=r"Index\.open"):
            pickle.dumps(index)
        for threads in (0, -1):
            with pytest.raises(UsageError):
                Index.open(index.path, threads=threads)

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


def test_the_package_lists_what_it_offers() -> None:
    assert set(flashtrie_cli.__all__) <= set(dir(flashtrie_cli))


def test_a_cap_above_the_machine_is_none(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("small", "huge", "beyond")]
    for path, memory in zip(paths, (1 << 28, 1 << 40, 1 << 70), strict=True):
        build_index([[1, 2], [1]], path, options=BuildOptions(memory=memory, tail="auto"))
    assert len({Path(path).read_bytes() for path in paths}) == 1
