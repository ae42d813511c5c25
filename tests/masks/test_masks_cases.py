"""The contract, case by case, each against its own words and against the oracle."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from masks_world import (
    A_HOLE,
    BOS,
    EMPTY,
    EOS,
    EOT,
    IM_START,
    PAD,
    THINK,
    bits_of,
    byte,
    piece,
    random_states,
    trap_vocabulary,
)  # fmt: skip

from flashtrie_cli.engine.cpu_masks import read_rows
from flashtrie_cli.engine.reference_masks import ReferenceMasks
from flashtrie_cli.errors import InputError, UsageError
from flashtrie_cli.query.token_masks import REJECTED, TokenMasks
from flashtrie_cli.trie.token_bytes import ADDED, BYTE_FALLBACK, NORMAL, SPECIAL, TokenBytes

VOCABULARY = trap_vocabulary()
NEVER = {PAD, BOS, IM_START, A_HOLE, EMPTY}


def compiled(members, *, eos=(EOS,), vocabulary=VOCABULARY, **options) -> TokenMasks:
    """Masks of a set, compared with the oracle on every state that byte paths reach."""
    masks = TokenMasks.from_strings(members, vocabulary, eos=eos, **options)
    as_bytes = [spelled(member, options) for member in members]
    oracle = ReferenceMasks(as_bytes, vocabulary, eos, added_is_text=options.get("added_is_text", True))
    assert masks.num_nodes == len(oracle.paths)
    row = masks.bitmask()
    for path in oracle.paths:
        state = masks.walk_bytes(path)
        want = oracle.allowed(path)
        assert masks.allowed(state).tolist() == want, path
        masks.fill([state], row)
        assert bits_of(row[0]) == want
        assert masks.forced(state).bytes == oracle.forced_bytes(path)
        for token in want:
            after, allowed = masks.advance([state], [token])
            _, path_after = oracle.advance(path, token)
            assert allowed[0]
            assert after[0] == (masks.ended if path_after is None else masks.walk_bytes(path_after))
    return masks


def spelled(member, options) -> bytes:
    if options.get("json_quoted"):
        member = json.dumps(member, ensure_ascii=False)
    data = member if isinstance(member, bytes) else member.encode()
    return b" " + data if options.get("prefix_space") else data


def allowed_after(masks: TokenMasks, text: str | bytes) -> set[int]:
    data = text if isinstance(text, bytes) else text.encode()
    return set(masks.allowed(masks.walk_bytes(data)).tolist())


def test_case_01_member_is_a_prefix_of_another():
    masks = compiled(["yes", "yes no"])
    assert allowed_after(masks, "yes") == {EOS, piece(" no"), piece(" n"), piece(" "), byte(" ")}
    masks = compiled(["a", "ab", "abc"])
    assert EOS in allowed_after(masks, "a")
    assert allowed_after(masks, "") == {piece("a"), byte("a"), piece("ab"), piece("abc")}


def test_case_02_leaf_allows_exactly_the_end_ids():
    masks = compiled(["yes"], eos=(EOS, EOT))
    assert allowed_after(masks, "yes") == {EOS, EOT}


def test_case_03_several_end_ids():
    masks = compiled(["a", "abc"], eos=(EOT, EOS))
    assert masks.eos == (EOS, EOT)
    assert {EOS, EOT} <= allowed_after(masks, "a")
    for end in (EOS, EOT):
        matcher = masks.matcher()
        assert matcher.advance(piece("a"))
        assert matcher.advance(end)
        assert matcher.is_terminated


def test_case_04_after_the_end_nothing_is_allowed():
    masks = compiled(["a"])
    matcher = masks.matcher()
    assert matcher.advance(piece("a"))
    assert matcher.advance(EOS)
    row = np.full((1, masks.num_words), -1, np.int32)
    matcher.fill(row)
    assert not row.any()
    assert matcher.allowed().tolist() == []
    assert not matcher.advance(EOS)
    assert not matcher.advance(piece("a"))
    assert matcher.is_terminated
    assert matcher.forced() == (b"", [])


def test_case_05_text_of_the_end_token():
    masks = compiled(["</s>", "<|eot_id|>"], eos=(EOS, EOT))
    at_root = allowed_after(masks, "")
    assert not at_root & {EOS, EOT}
    assert at_root == {piece("<"), piece("</"), piece("</s"), byte("<")}
    assert EOS in allowed_after(masks, "</s>")


def test_case_06_text_of_another_special_token():
    masks = compiled(["<|im_start|>user", "<bos>"])
    assert allowed_after(masks, "") == {piece("<"), byte("<")}
    assert IM_START not in allowed_after(masks, "")


def test_case_07_added_tokens_that_are_not_special():
    assert THINK in allowed_after(compiled(["<think>a"]), "")
    assert THINK not in allowed_after(compiled(["<think>a"], added_is_text=False), "")


def test_case_08_a_single_path_allows_every_segmentation():
    masks = compiled(["account.List"])
    assert allowed_after(masks, "account") == {piece("."), piece(".L"), piece(".List"), byte(".")}
    text, tokens = masks.forced(0)
    assert text == b"account.List"
    assert tokens == [piece("account"), piece(".List")]


def test_case_09_a_single_member():
    masks = compiled(["yes"])
    assert allowed_after(masks, "") == {piece("y"), piece("ye"), piece("yes"), byte("y")}


def test_case_10_the_empty_string():
    masks = compiled(["", "a"])
    assert allowed_after(masks, "") == {EOS, piece("a"), byte("a")}
    only = compiled([""])
    assert allowed_after(only, "") == {EOS}


def test_case_11_repeats_change_nothing():
    once, twice = compiled(["abc", "yes"]), compiled(["yes", "abc", "yes", "abc"])
    assert twice.num_members == 2
    for name, array in vars(once.arrays).items():
        assert np.array_equal(array, getattr(twice.arrays, name)), name


def test_case_12_equal_bytes_in_two_ids():
    assert {piece("a"), byte("a")} <= allowed_after(compiled(["a"]), "")


def test_case_13_tokens_that_split_a_character():
    masks = compiled(["öé", "日本", "😀", "e\u0301"])
    assert {piece(b"\xc3"), byte(b"\xc3"), piece("ö")} <= allowed_after(masks, "")
    assert piece(b"\xb6\xc3") in allowed_after(masks, b"\xc3")
    assert piece(b"\xf0\x9f") in allowed_after(masks, "")
    assert piece("\u0301") in allowed_after(masks, "e")


def test_case_14_the_byte_ff():
    masks = compiled([b"\xff\xfe", "a"])
    assert {piece(b"\xff"), piece(b"\xff\xfe"), byte(b"\xff")} <= allowed_after(masks, "")
    assert piece(b"\xff") not in allowed_after(compiled(["a"]), "")


@pytest.mark.parametrize("extra", [0, 1, 7, 31, 32, 100])
def test_case_15_padding_ids_and_spare_bits(extra):
    width = len(VOCABULARY) + extra
    masks = compiled(["yes", "abc"], vocab_size=width)
    assert masks.num_words == -(-width // 32)
    row = np.full(masks.num_words + 3, -1, np.int32)
    masks.matcher().fill(row)
    assert max(bits_of(row)) < len(VOCABULARY)
    assert not row[masks.num_words :].any()
    matcher = masks.matcher()
    assert not any(matcher.advance(token) for token in range(len(VOCABULARY), width + 40))


def test_case_16_the_space_symbol_as_data():
    masks = compiled(["\u2581sp", " sp"])
    assert allowed_after(masks, "") == {piece(" "), byte(" "), byte(b"\xe2"), piece(b"\xe2\x96")}


def test_case_17_a_space_first():
    assert piece(" no") not in allowed_after(compiled(["no"]), "")
    assert piece(" no") in allowed_after(compiled(["no"], prefix_space=True), "")


def test_case_18_the_empty_token():
    for text in ("", "a"):
        assert EMPTY not in allowed_after(compiled(["", "a", "ab"]), text)


def test_case_19_json_strings():
    members = ['say "a"', "back\\slash", "öé", "line\nbreak\ttab\r\b\f\x01\x1f\x7f", "", "/"]
    masks = compiled(members, json_quoted=True)
    assert piece('"') in allowed_after(masks, "")
    assert piece("ö") in allowed_after(masks, '"')
    assert masks.walk_bytes(b'"line\\nbreak\\ttab\\r\\b\\f\\u0001\\u001f\x7f"') is not None


def test_case_20_control_characters():
    masks = compiled(["a\0b", "\n\n", "\r\n\t\x7f"])
    assert {piece("\n"), piece("\n\n"), byte("\n"), byte("\r")} <= allowed_after(masks, "")
    assert byte("\0") in allowed_after(masks, "a")


def test_case_21_a_refused_token_changes_nothing():
    masks = compiled(["abc"])
    matcher = masks.matcher()
    assert matcher.advance(piece("a"))
    before = (matcher.state, matcher.num_accepted)
    for token in (-1, piece("yes"), EOS, PAD, len(VOCABULARY), 2**31, 2**40, -(2**40)):
        assert not matcher.advance(token), token
        assert (matcher.state, matcher.num_accepted) == before
    states, allowed = masks.advance([0, 0, masks.ended], [piece("yes"), -7, EOS])
    assert states.tolist() == [0, 0, masks.ended]
    assert allowed.tolist() == [False, False, False]


def test_case_22_rollback_over_the_end_fork_and_reset():
    masks = compiled(["abc", "ab"])
    matcher = masks.matcher()
    for token in (piece("a"), piece("b"), EOS):
        assert matcher.advance(token)
    other = matcher.fork()
    matcher.rollback(1)
    assert not matcher.is_terminated
    assert EOS in matcher.allowed()
    assert other.is_terminated
    matcher.rollback(2)
    assert matcher.state == 0
    with pytest.raises(ValueError, match="take back"):
        matcher.rollback(1)
    other.rollback(3)
    assert other.advance(piece("abc"))
    other.reset()
    assert (other.state, other.num_accepted) == (0, 0)


def test_case_24_a_large_set():
    members = [f"{number:05d}" for number in range(0, 100_000, 1)]
    masks = TokenMasks.from_strings(members, VOCABULARY, eos=[EOS])
    assert masks.num_members == 100_000
    assert allowed_after(masks, "0123") == {byte(str(digit)) for digit in range(10)}
    assert allowed_after(masks, "01234") == {EOS}


def test_case_25_long_tokens_and_long_members():
    members = ["x" * 300, "=" * 1100, "=" * 1024 + "a"]
    masks = compiled(members)
    assert piece(b"x" * 128) in allowed_after(masks, "")
    assert piece(b"x" * 128) in allowed_after(masks, "x" * 172)
    assert piece(b"x" * 128) not in allowed_after(masks, "x" * 173)
    matcher = masks.matcher()
    assert matcher.advance(piece(b"=" * 1024))
    assert matcher.advance(piece("a"))
    assert matcher.allowed().tolist() == [EOS]


def test_no_members_allow_nothing():
    masks = compiled([])
    assert masks.allowed(0).tolist() == []
    assert masks.num_nodes == 1


def test_members_of_both_kinds_and_bad_ones():
    assert compiled([b"abc", "abc"]).num_members == 1
    with pytest.raises(InputError, match=r"member 1 .*surrogate"):
        TokenMasks.from_strings(["a", "\ud800"], VOCABULARY, eos=[EOS])
    with pytest.raises(InputError, match="member 0 is neither"):
        TokenMasks.from_strings([7], VOCABULARY, eos=[EOS])


def test_end_ids_are_needed_and_inside_and_never_text():
    with pytest.raises(UsageError, match="no end-of-sequence"):
        TokenMasks.from_strings(["a"], VOCABULARY)
    with pytest.raises(UsageError, match="outside the vocabulary"):
        TokenMasks.from_strings(["a"], VOCABULARY, eos=[len(VOCABULARY)])
    with pytest.raises(UsageError, match="below the tokenizer's"):
        TokenMasks.from_strings(["a"], VOCABULARY, eos=[EOS], vocab_size=10)
    masks = compiled(["\n\na", "\n"], eos=[piece("\n")])
    assert allowed_after(masks, "") == {piece("\n\n"), byte("\n")}
    assert piece("\n") in allowed_after(masks, "\n")


def test_a_vocabulary_without_some_bytes():
    tokens = type(VOCABULARY).from_tokens([(1, b"</s>"), (0, b"ab"), (0, b"a"), (0, b"cd"), (0, b"bc")])
    masks = TokenMasks.from_strings(["abcd", "abx"], tokens, eos=[0])
    assert masks.allowed(0).tolist() == [1, 2]
    assert masks.walk_bytes(b"abcd") is not None
    assert masks.walk_bytes(b"abc") is not None
    assert masks.walk_bytes(b"abx") is None
    assert masks.forced(0).bytes == b"ab"


def test_batches_agree_with_single_states():
    members = [
        "".join(random.Random(seed).choices(["a", "ab", "yes", "under", "ö", " "], k=6))
        for seed in range(400)
    ]
    masks = TokenMasks.from_strings(members, VOCABULARY, eos=[EOS, EOT])
    rng = random.Random(5)
    visited = random_states(masks, rng, 600)
    states = [state for state, _ in visited]
    want = np.concatenate([_row(masks, state) for state in states])
    bitmask = np.full((600, masks.num_words), 77, np.int32)
    masks.fill(states, bitmask)
    assert np.array_equal(bitmask, want)

    rows = masks.rows(64)
    for _ in range(300):
        chosen = np.array(rng.choices([*states, masks.ended, 0], k=rng.randrange(1, 65)), np.uint32)
        rows.fill(chosen)
        masks.fill(chosen, bitmask)
        assert np.array_equal(rows.words[: len(chosen)], bitmask[: len(chosen)])
        shown = rows.table[rows.share(chosen)]
        assert np.array_equal(shown, bitmask[: len(chosen)])
    rows.words[:] = -1
    rows.forget()
    rows.fill(chosen)
    assert np.array_equal(rows.words[: len(chosen)], bitmask[: len(chosen)])

    longest = max(len(path) for _, path in visited)
    padded = np.full((600, longest), -1, np.int64)
    for at, (state, path) in enumerate(visited):
        padded[at, : len(path)] = path
        assert masks.walk([path])[0] == state
    assert (masks.walk(padded)[[len(path) < longest for _, path in visited]] == REJECTED).all()
    finished = [[*path, EOS, PAD, PAD] for state, path in visited if EOS in masks.allowed(state)]
    assert all(masks.walk([row])[0] == masks.ended for row in finished)


def test_a_next_byte_is_forced_where_there_is_one_way_on():
    sets = [[], [""], ["a"], ["", "a"], ["ab", "abc", "abd", "b"], ["ab" * 70]]
    for seed in range(40):
        rng = random.Random(seed)
        sets.append(["".join(rng.choices("ab", k=rng.randrange(9))) for _ in range(rng.randrange(1, 80))])
    for members in sets:
        masks = TokenMasks.from_strings(members, VOCABULARY, eos=[EOS])
        prefixes = {member[:end] for member in members for end in range(len(member) + 1)} | {""}
        assert len(prefixes) == masks.num_nodes
        for prefix in prefixes:
            text = prefix
            while text not in members:
                ways = {other[len(text)] for other in prefixes if other.startswith(text) and other != text}
                if len(ways) != 1:
                    break
                text += ways.pop()
            state = masks.walk_bytes(prefix.encode())
            assert masks.forced(state).bytes == text[len(prefix) :].encode(), (members, prefix)


def _row(masks: TokenMasks, state: int) -> np.ndarray:
    row = masks.bitmask()
    ids = masks.allowed(state)
    np.bitwise_or.at(row[0].view(np.uint32), ids >> 5, np.uint32(1) << (ids & 31))
    return row


def test_wrong_arrays_and_states_are_refused():
    masks = compiled(["abc"])
    matcher = masks.matcher()
    narrow = np.zeros((1, masks.num_words - 1), np.int32)
    for bad, kind in [
        (narrow, ValueError),
        (np.zeros((1, masks.num_words), np.int64), TypeError),
        (np.zeros((1, masks.num_words), np.float32), TypeError),
        (np.zeros((masks.num_words, 4), np.int32)[:, ::2], (BufferError, ValueError)),
        (np.zeros((1, 1, masks.num_words), np.int32), TypeError),
        ([0] * masks.num_words, TypeError),
    ]:
        with pytest.raises(kind):
            matcher.fill(bad)
    read_only = masks.bitmask()
    read_only.flags.writeable = False
    with pytest.raises((BufferError, ValueError)):
        matcher.fill(read_only)
    with pytest.raises(IndexError):
        matcher.fill(masks.bitmask(2), 2)
    for call in (masks.allowed, masks.forced, lambda state: masks.fill([state], masks.bitmask())):
        with pytest.raises(ValueError, match="outside the trie"):
            call(masks.ended + 1)


def test_tokens_that_lead_far():
    """A wide vocabulary leaves few bits for the distance: most entries go through the far table."""
    members = [f"{first}{second}under_score" for first in "abnoy" for second in range(300)] + ["a", "under"]
    near = TokenMasks.from_strings(members, VOCABULARY, eos=[EOS])
    far = TokenMasks.from_strings(members, VOCABULARY, eos=[EOS], vocab_size=1 << 24)
    assert len(near.arrays.far_entries) == 0
    assert len(far.arrays.far_entries) > 10
    for state in range(near.num_nodes):
        want = near.allowed(state)
        assert far.allowed(state).tolist() == want.tolist()
        states = [state] * len(want)
        assert far.advance(states, want)[0].tolist() == near.advance(states, want)[0].tolist()


TWINS = TokenBytes.from_tokens(
    [
        (SPECIAL, b"</s>"),
        (NORMAL, b"a"),
        (NORMAL, b"ab"),
        (BYTE_FALLBACK, b"a"),
        (NORMAL, b"abc"),
        (NORMAL, b"a"),
        (BYTE_FALLBACK, b"b"),
        (NORMAL, b"b"),
        (NORMAL, b"c"),
        (ADDED, b"d"),
        (NORMAL, b"bc"),
    ]
)


def test_bytes_with_one_token_or_several_are_no_entries():
    """Of the nodes of `abcd`, all single but the last, only longer tokens are entries."""
    masks = compiled(["abcd"], eos=(0,), vocabulary=TWINS)
    assert [masks.allowed(state).tolist() for state in range(5)] == [
        [1, 2, 3, 4, 5],
        [6, 7, 10],
        [8],
        [9],
        [0],
    ]
    assert (masks.arrays.entries >> masks.set.hop_bits).tolist() == [2, 4, 10]
    assert masks.num_allowed == 10
    assert masks.forced(0) == (b"abcd", [4, 9])
    without = TokenMasks.from_strings(["abcd"], TWINS, eos=[0], added_is_text=False)
    assert without.allowed(3).tolist() == []
    assert without.forced(0) == (b"abcd", [4])


def test_nodes_with_several_children_or_a_member_keep_their_bytes():
    masks = compiled(["a", "ab", "b", "bb", "bc"], eos=(0,), vocabulary=TWINS)
    tokens = (masks.arrays.entries >> masks.set.hop_bits).tolist()
    assert tokens == [1, 2, 3, 5, 6, 7, 10, 6, 7, 6, 7, 8]  # of the root, `a` and `b`


def test_a_byte_without_a_token_of_its_own():
    """A longer token spells it, or nothing does."""
    vocabulary = TokenBytes.from_tokens(
        [(SPECIAL, b"</s>"), (NORMAL, b"a"), (NORMAL, b"xy"), (NORMAL, b"ax")]
    )
    masks = TokenMasks.from_strings(["axya", "y"], vocabulary, eos=[0])
    assert masks.allowed(0).tolist() == [1, 3]
    assert masks.allowed(1).tolist() == [2]
    assert masks.allowed(2).tolist() == []
    assert masks.walk([[1, 2, 1, 0]]).tolist() == [masks.ended]


def test_plain_lists_have_an_entry_for_every_token():
    members = [f"{first}{second}under_score" for first in "abnoy" for second in range(300)] + ["a", "under"]
    masks = TokenMasks.from_strings(members, VOCABULARY, eos=[EOS], vocab_size=1 << 24)
    rows, entries, far_entries, far_targets = masks.set.plain()
    starts, is_terminal = read_rows(rows)
    assert len(entries) == masks.num_allowed == starts[-1]
    assert len(entries) > len(masks.arrays.entries)
    assert np.array_equal(far_targets, masks.arrays.far_targets)
    far = dict(zip(far_entries.tolist(), far_targets.tolist(), strict=True))
    hops = (1 << masks.set.hop_bits) - 1
    for state in range(masks.num_nodes):
        part = range(starts[state], starts[state + 1])
        tokens = [int(entries[at]) >> masks.set.hop_bits for at in part]
        assert tokens == [token for token in masks.allowed(state).tolist() if token != EOS]
        assert is_terminal[state] == (EOS in masks.allowed(state))
        leads_to = [far.get(at, state + (int(entries[at]) & hops)) for at in part]
        assert masks.advance([state] * len(tokens), tokens)[0].tolist() == leads_to
