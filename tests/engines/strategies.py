"""Nasty sets of keys and grids (docs: the empty set, the empty key, prefixes, ties, the largest token …)."""

from __future__ import annotations

from hypothesis import strategies as st

from flashtrie_cli import SearchPlan

LARGEST = 2**31 - 1

ALPHABETS = (
    (0, 1),
    (0, 1, 2, 3, 4, 5, 6, 7),
    (65534, 65535),
    (65535, 65536, 65537, 131071, 131072),
    (0, 1, 65536, 65537, LARGEST - 1, LARGEST),
    tuple(range(0, 700, 7)),
    (3, 65539, 131075, 196611),  # equal low halves
)

Key = tuple[int, ...]


@st.composite
def key_lists(draw: st.DrawFn, min_size: int = 0, max_size: int = 60) -> list[Key]:
    """Keys in any order, some given twice, many of them prefixes of one another."""
    token = st.sampled_from(draw(st.sampled_from(ALPHABETS)))
    key = st.lists(token, max_size=draw(st.sampled_from((1, 2, 5)))).map(tuple)
    keys = draw(st.lists(key, min_size=min_size, max_size=max_size))
    if keys and draw(st.booleans()):
        keys += draw(st.lists(st.sampled_from(keys), max_size=10))
    if keys and draw(st.booleans()):  # one long chain under a key
        at = draw(st.sampled_from(keys))
        keys.append(at + (draw(token),) * draw(st.integers(1, 130)))
    return draw(st.permutations(keys)) if len(keys) < 20 else keys


def probes(keys: list[Key]) -> st.SearchStrategy[list[Key]]:
    """Keys, prefixes and extensions of keys, and sequences that are neither."""
    tokens = sorted({token for key in keys for token in key} | {0, 65536, LARGEST, 2**32 - 1, 2**40})
    anything = st.lists(st.sampled_from(tokens), max_size=4).map(tuple)
    if not keys:
        return st.lists(anything, max_size=10)
    one = st.sampled_from(keys)
    cut = st.tuples(one, st.integers(0, 6)).map(lambda pair: pair[0][: pair[1]])
    longer = st.tuples(one, anything).map(lambda pair: pair[0] + pair[1])
    return st.lists(st.one_of(one, cut, longer, anything), max_size=40)


LOGPROBS = (0.0, -0.0, -0.5, -1.0, -1.0, -1.5, -2.0, -0.1, -0.3, -1e-30, -1e-45, -3e38, 2.5, float("-inf"))


@st.composite
def grids(draw: st.DrawFn, keys: list[Key]) -> list[list[tuple[int, float]]]:
    """Steps of slots: tokens of the keys and some of none, few different log-probs, so that ties abound."""
    tokens = sorted({token for key in keys for token in key} | {0, 1, LARGEST, 2**32 - 1})
    num_steps, num_slots = draw(st.integers(0, 6)), draw(st.integers(0, 12))
    slot = st.tuples(st.sampled_from(tokens), st.sampled_from(LOGPROBS))
    row = st.lists(slot, min_size=num_slots, max_size=num_slots)
    return draw(st.lists(row, min_size=num_steps, max_size=num_steps))


@st.composite
def plans(draw: st.DrawFn, keys: list[Key]) -> SearchPlan:
    tokens = sorted({token for key in keys for token in key} | {0, 1})
    return SearchPlan(
        beam_width=draw(st.sampled_from((1, 2, 3, 10, 1000))),
        num_results=draw(st.sampled_from((None, None, 1, 2, 5, 1000))),
        alpha=draw(st.sampled_from((0.0, 0.5, 1.0, 5.0, 30.0))),
        token_threshold=draw(st.sampled_from((float("-inf"), float("-inf"), -1.0, -0.1, 5.0))),
        sequence_threshold=draw(st.sampled_from((float("-inf"), float("-inf"), -3.0, -1.0, 1.0))),
        eos=draw(st.one_of(st.none(), st.none(), st.sampled_from(tokens))),
        padding=draw(st.one_of(st.just(2**32 - 1), st.just(2**32 - 1), st.sampled_from(tokens))),
    )
