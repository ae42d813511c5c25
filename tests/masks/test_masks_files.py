"""Index files of token masks, the automaton's cache, sets and the command line."""

from __future__ import annotations

import gzip
import json
import os
import subprocess

import numpy as np
import pytest
import zstandard
from masks_world import EOS, EOT, THINK, byte, piece, trap_vocabulary
from program import run_flashtrie

from flashtrie_cli.engine.cpu_masks import open_automaton
from flashtrie_cli.errors import IndexFileError, InputError, OutputError, UsageError
from flashtrie_cli.format import layout
from flashtrie_cli.format.writer import IndexWriter
from flashtrie_cli.keys.string_sets import read_schema_enum, read_string_sets
from flashtrie_cli.keys.token_vocabulary import open_vocabulary
from flashtrie_cli.masks_build import build_masks, parse_ids
from flashtrie_cli.query.mask_output import escaped
from flashtrie_cli.query.mask_statistics import describe_masks
from flashtrie_cli.query.token_masks import TokenMasks

VOCABULARY = trap_vocabulary()
MEMBERS = ["yes", "yes no", "account.List", "öabc", "a\tb", "under_score", "</s>"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHTRIE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def masks() -> TokenMasks:
    return TokenMasks.from_strings(MEMBERS, VOCABULARY, eos=[EOS, EOT], vocab_size=400)


def voc1(tmp_path) -> str:
    packed = b"VOC1" + len(VOCABULARY).to_bytes(4, "little")
    for token in range(len(VOCABULARY)):
        text = VOCABULARY[token]
        packed += bytes([VOCABULARY.kinds[token]]) + len(text).to_bytes(2, "little") + text
    path = tmp_path / "vocab.bin"
    path.write_bytes(packed)
    return str(path)


@pytest.mark.parametrize("codec", ["zstd", "raw"])
def test_a_saved_index_answers_the_same(masks, tmp_path, codec):
    path = str(tmp_path / "set.ftrie")
    masks.save(path, codec=codec)
    opened = TokenMasks.open(path)
    assert opened.meta == masks.meta
    for name, array in vars(masks.arrays).items():
        assert np.array_equal(getattr(opened.arrays, name), array), name
    assert [opened.allowed(state).tolist() for state in range(opened.num_nodes)] == [
        masks.allowed(state).tolist() for state in range(masks.num_nodes)
    ]
    assert opened.tokens[THINK] == b"<think>"
    masks.save(str(tmp_path / "again.ftrie"), codec=codec)
    assert (tmp_path / "again.ftrie").read_bytes() == (tmp_path / "set.ftrie").read_bytes()
    with pytest.raises(OutputError, match="exists already"):
        masks.save(path)


def test_every_flipped_byte_is_noticed_or_harmless(masks, tmp_path):
    path = tmp_path / "set.ftrie"
    masks.save(str(path))
    data = path.read_bytes()
    want = [masks.allowed(state).tolist() for state in range(masks.num_nodes)]
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        path.write_bytes(damaged)
        try:
            opened = TokenMasks.open(str(path))
        except IndexFileError:
            continue
        assert [opened.allowed(state).tolist() for state in range(opened.num_nodes)] == want
    for end in range(0, len(data), 37):
        path.write_bytes(data[:end])
        with pytest.raises(IndexFileError):
            TokenMasks.open(str(path))


def test_lies_with_valid_checksums_are_refused(masks, tmp_path):
    """Any single word of any array changed at will: refused, or every answer stays inside the arrays."""
    path = str(tmp_path / "lie.ftrie")
    rng = np.random.default_rng(0)
    num_refused = 0
    for name, array in vars(masks.arrays).items():
        for _ in range(60):
            lying = array.copy()
            if len(lying):
                largest = int(np.iinfo(array.dtype).max)
                lies = [0, 1, largest, int(rng.integers(largest, dtype=np.uint64))]
                lying[rng.integers(len(lying))] = lies[rng.integers(len(lies))]
            num_refused += write_and_try(masks, {name: lying}, path)
        for other in (array[:-1], np.append(array, array[:1])):
            num_refused += write_and_try(masks, {name: other}, path)
    assert num_refused > 100


def test_lies_about_the_order_of_tokens_are_refused(masks, tmp_path):
    """A token twice at a node, one below the one before, and a far target that no entry has."""
    path = str(tmp_path / "lie.ftrie")
    entries = masks.arrays.entries
    hop = (1 << 32 - (masks.vocab_size - 1).bit_length()) - 1
    token, place = entries & ~np.uint32(hop), entries & np.uint32(hop)
    twice, swapped = entries.copy(), entries.copy()
    twice[1] = token[0] | place[1]
    swapped[:2] = token[1] | place[0], token[0] | place[1]
    for lying in (twice, swapped):
        assert write_and_try(masks, {"entries": lying}, path)
    far = {
        name: np.append(array, array.dtype.type(0))
        for name, array in vars(masks.arrays).items()
        if name in ("far_entries", "far_targets")
    }
    assert len(far) == 2
    assert write_and_try(masks, far, path)
    assert not write_and_try(masks, {}, path)


def write_and_try(masks: TokenMasks, changed: dict, path: str) -> bool:
    with IndexWriter(path, kind=layout.KIND_TOKEN_MASKS, force=True, version=layout.MASKS_VERSION) as writer:
        writer.add_json(layout.META, masks.meta)
        for name, array in {**vars(masks.arrays), **changed}.items():
            writer.add(layout.MASK_SECTION_PREFIX + name, array)
        for name in ("kinds", "begins", "data"):
            writer.add(f"mask_token_{name}", getattr(masks.tokens, name))
    try:
        opened = TokenMasks.open(path)
    except IndexFileError:
        return True
    for state in range(opened.num_nodes + 1):
        assert all(token < opened.vocab_size for token in opened.allowed(state).tolist())
        opened.forced(state)
    return False


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"eos": "x"},
        {"vocab_size": 0},
        {"vocab_size": 1 << 30},
        {"eos": [9, 3]},
        {"eos": [-1]},
        {"eos": [400]},
    ],
)
def test_bad_meta_is_refused(masks, tmp_path, meta):
    masks.meta = {**masks.meta, **meta} if meta else meta
    masks.save(str(tmp_path / "bad.ftrie"))
    with pytest.raises(IndexFileError):
        TokenMasks.open(str(tmp_path / "bad.ftrie"))


def test_other_kinds_of_index_are_refused(tmp_path):
    path = str(tmp_path / "trie.ftrie")
    with IndexWriter(path, kind=layout.KIND_TOKEN_TRIE) as writer:
        writer.add_json(layout.META, {})
    with pytest.raises(IndexFileError, match="without token masks"):
        TokenMasks.open(path)


# --- the automaton's cache ---


def test_the_automaton_is_cached_and_a_damaged_cache_is_replaced(tmp_path):
    first = open_automaton(VOCABULARY, [EOS], cache_dir=tmp_path)
    second = open_automaton(VOCABULARY, [EOS], cache_dir=tmp_path)
    assert (first.from_cache, second.from_cache) == (False, True)
    assert np.array_equal(first.slots, second.slots)
    (cached,) = tmp_path.iterdir()
    data = bytearray(cached.read_bytes())
    for damage in (data[: len(data) // 2], data[:100] + b"\xff" + data[101:], b"", b"nonsense"):
        cached.write_bytes(damage)
        again = open_automaton(VOCABULARY, [EOS], cache_dir=tmp_path)
        assert not again.from_cache
        assert np.array_equal(first.slots, again.slots)
        assert open_automaton(VOCABULARY, [EOS], cache_dir=tmp_path).from_cache
    assert len(list(tmp_path.iterdir())) == 1


def test_what_spells_text_names_the_automaton(tmp_path):
    plain = open_automaton(VOCABULARY, [EOS], cache_dir=tmp_path)
    assert open_automaton(VOCABULARY, [EOT], cache_dir=tmp_path).digest == plain.digest
    assert open_automaton(VOCABULARY, [EOS], added_is_text=False, cache_dir=tmp_path).digest != plain.digest
    assert open_automaton(VOCABULARY, [piece("\n")], cache_dir=tmp_path).digest != plain.digest


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert len(open_automaton(VOCABULARY, [EOS], cache_dir=blocked / "below").slots)


# --- sets ---


def test_lines(tmp_path):
    raw = "\ufeffyes\r\nno\n\nöabc\ttab\nlast".encode() + b"\xff"
    for name, data in [("a.txt", raw), ("a.gz", gzip.compress(raw)), ("a.zst", zstandard.compress(raw))]:
        (tmp_path / name).write_bytes(data)
        found = read_string_sets([str(tmp_path / name)])
        assert found.members == [b"yes", b"no", "öabc\ttab".encode(), b"last\xff"]
        assert found.num_empty_lines_skipped == 1


def test_json_sets(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('["a\\n", "", "ö"]')
    assert read_string_sets([str(path), str(path)], "json").members == ["a\n", "", "ö"] * 2
    path.write_text('"a"\n\n"b\\u0000"\n')
    assert read_string_sets([str(path)], "jsonl").members == ["a", "b\0"]
    for text, form, message in [
        ("{}", "json", "an object where an array"), ('["a", 3]', "json", "a number at position 1"),
        ('"a"\n[1]\n', "jsonl", "2: holds an array"), ("[", "json", "is not JSON"), ("a\n", "jsonl", "1: is not JSON"),
    ]:  # fmt: skip
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            read_string_sets([str(path)], form)
    with pytest.raises(UsageError):
        read_string_sets([str(path)], "csv")


def test_the_enum_of_a_schema(tmp_path):
    path = tmp_path / "schema.json"
    schema = {
        "properties": {
            "x": {"enum": ["a", "b"]}, "y": {"$ref": "#/$defs/y~1z"}, "k": {"const": "only"}, "n": {"type": "string"},
            "list": {"anyOf": [{"enum": ["c"]}]}, "loop": {"$ref": "#/properties/loop"},
            "inside": {"$ref": "#/properties/inside/x"},
        },
        "$defs": {"y/z": {"enum": ["d", "e"]}},
    }  # fmt: skip
    path.write_text(json.dumps(schema))
    for pointer, want in [
        ("/properties/x", ["a", "b"]), ("/properties/x/enum", ["a", "b"]), ("#/properties/y", ["d", "e"]),
        ("/properties/k", ["only"]), ("/properties/list/anyOf/0", ["c"]),
    ]:  # fmt: skip
        assert read_schema_enum(str(path), pointer).members == want
    for pointer, error in [
        ("/properties/inside/x", InputError),
        ("/properties/n", InputError),
        ("/nowhere", InputError),
        ("x", UsageError),
        ("/properties/loop", InputError),
    ]:
        with pytest.raises(error):
            read_schema_enum(str(path), pointer)


# --- building and asking on the command line ---


def test_build_reports_and_refuses(tmp_path):
    tokenizer, source, out = voc1(tmp_path), tmp_path / "set.txt", str(tmp_path / "set.ftrie")
    source.write_text("yes\nno\nyes\n\n")
    with pytest.raises(InputError, match=r"vocab.bin: .*which token ends"):
        build_masks([str(source)], out, tokenizer=tokenizer)
    with pytest.raises(UsageError, match="--tokenizer"):
        build_masks([str(source)], out, tokenizer=None)
    report = build_masks([str(source)], out, tokenizer=tokenizer, eos="1,3", vocab_size=500)
    assert (report.counts["num_members_read"], report.counts["num_members"]) == (3, 2)
    assert report.counts["num_empty_lines_skipped"] == 1
    assert report.file_size == os.path.getsize(out)
    assert not report.counts["automaton_from_cache"]
    assert build_masks([str(source)], out, tokenizer=tokenizer, eos="1", force=True).counts[
        "automaton_from_cache"
    ]
    with pytest.raises(UsageError, match="not a list of token ids"):
        parse_ids("1,x", "--eos")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"codec": "lzma"}, "codec 'lzma'"),
        ({"level": 23}, "level 23"),
        ({"vocab_size": (1 << 24) + 1}, "16777217 is not between"),
        ({"vocab_size": 1 << 40}, "is not between"),
        ({"vocab_size": 1 << 70}, "is not between"),
        ({"eos": str(1 << 40)}, "end-of-sequence id 1099511627776 is above"),
        ({"tokenizer": "words"}, "not of words"),
        ({"pointer": "/x"}, "--json-schema"),
    ],
)
def test_options_out_of_range(tmp_path, options, says):
    source, out = tmp_path / "set.txt", tmp_path / "set.ftrie"
    source.write_text("yes\n")
    with pytest.raises(UsageError, match=says):
        build_masks([str(source)], str(out), **{"tokenizer": voc1(tmp_path), "eos": "1", **options})
    assert not out.exists()


@pytest.mark.parametrize("deep", ["[" * 100_000, '{"a":' * 100_000])
def test_sets_nested_too_deeply(tmp_path, deep):
    path = tmp_path / "deep.json"
    path.write_text(deep)
    for read in (
        lambda: read_string_sets([str(path)], "json"),
        lambda: read_string_sets([str(path)], "jsonl"),
        lambda: read_schema_enum(str(path), ""),
        lambda: open_vocabulary(str(path)),
    ):
        with pytest.raises(InputError, match=r"deep.json"):
            read()


@pytest.mark.parametrize(
    ("form", "text", "place"),
    [("json", r'["a", "\ud800"]', "position 1"), ("jsonl", '"a"\n"\\ud800"\n', "set:2: ")],
)
def test_lone_surrogates_have_a_place(tmp_path, form, text, place):
    path = tmp_path / "set"
    path.write_text(text)
    with pytest.raises(InputError, match="lone surrogate") as found:
        read_string_sets([str(path)], form)
    assert place in str(found.value)


def test_added_tokens_may_be_left_out(tmp_path):
    tokenizer, source, out = voc1(tmp_path), tmp_path / "set.txt", str(tmp_path / "set.ftrie")
    source.write_text("<think>\n")
    build = ["build", str(source), "-o", out, "--masks", "--tokenizer", tokenizer, "--eos", "1", "--force"]
    for options, first in (([], THINK), (["--no-added-tokens"], None)):
        done = run_flashtrie(*build, *options)
        assert done.returncode == 0, done.stderr
        opened = TokenMasks.open(out)
        assert opened.meta["added_is_text"] == (not options)
        assert (THINK in opened.allowed(0).tolist()) == (first == THINK)
    refused = run_flashtrie("build", str(source), "-o", out, "--no-added-tokens", "--force")
    assert refused.returncode == 2
    assert b"go with --masks" in refused.stderr


@pytest.mark.parametrize(
    ("flags", "first", "width"),
    [
        ([], {"y", "ye", "yes"}, len(VOCABULARY)),
        (["--json-quoted"], {'"'}, len(VOCABULARY)),
        (["--prefix-space"], {" "}, len(VOCABULARY)),
        (["--vocab-size", "1000"], {"y", "ye", "yes"}, 1000),
    ],
)
def test_options_of_the_build(tmp_path, flags, first, width):
    source, out = tmp_path / "set.txt", str(tmp_path / "set.ftrie")
    source.write_text("yes\n")
    done = run_flashtrie(
        "build", source, "-o", out, "--masks", "--tokenizer", voc1(tmp_path), "--eos", "1", *flags
    )
    assert done.returncode == 0, done.stderr
    opened = TokenMasks.open(out)
    assert opened.vocab_size == width
    assert {opened.tokens[token].decode() for token in opened.allowed(0).tolist()} == first


def test_statistics(masks):
    found = describe_masks(masks)
    assert found["num_allowed"] == sum(found_count for found_count in counts(masks))
    assert sum(found["allowed_per_node"]["histogram"].values()) == masks.num_nodes
    assert found["largest"][0]["num_allowed"] == found["allowed_per_node"]["max"] == max(counts(masks))
    distinct = {tuple(masks.allowed(state).tolist()) for state in range(masks.num_nodes)}
    assert found["num_distinct_masks"] == len(distinct)
    assert found["memory"]["resident"] == masks.resident_bytes


def counts(masks: TokenMasks) -> list[int]:
    return [len(set(masks.allowed(state).tolist()) - set(masks.eos)) for state in range(masks.num_nodes)]


def run(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return run_flashtrie(*arguments, stdin=stdin)


@pytest.mark.parametrize(
    "option",
    [
        "--lowercase",
        "--values 2",
        "--value-type float",
        "--duplicates sum",
        "--sorted",
        "--tail on",
        "--estimate",
        "--memory 1M",
    ],
)
def test_options_for_keys_are_refused(tmp_path, option):
    """Instead of masks that leave out what was asked for."""
    (tmp_path / "set.txt").write_text("Yes\n")
    target = tmp_path / "m.ft"
    refused = run("build", str(tmp_path / "set.txt"), "-o", str(target), "--masks", *option.split())
    assert refused.returncode == 2
    assert b"not for --masks" in refused.stderr
    assert not target.exists()


def test_mask_command(masks, tmp_path):
    path = str(tmp_path / "set.ftrie")
    masks.save(path)
    found = run("mask", path)
    assert found.returncode == 0, found.stderr
    rows = [line.split("\t") for line in found.stdout.decode().splitlines()]
    assert [int(row[1]) for row in rows] == masks.allowed(0).tolist()
    assert [0, piece("yes"), "yes"] in [[int(row[0]), int(row[1]), row[2]] for row in rows]

    found = run("mask", path, "-", "--json", stdin=b"yes\nzebra\n\na\t\n")
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert [line["num_allowed"] for line in lines] == [
        len(masks.allowed(masks.walk_bytes(b"yes"))),
        0,
        len(masks.allowed(0)),
        2,
    ]
    assert {"id": EOS, "eos": True} in lines[0]["allowed"]
    assert lines[1]["state"] is None
    assert lines[3]["forced"] == {"text": "b"}

    found = run("mask", path, "-", "--ids", stdin=f"{piece('yes')}\n\n{piece('no')}\n".encode())
    numbers = [int(line.split(b"\t")[0]) for line in found.stdout.splitlines()]
    assert set(numbers) == {0, 1}

    marked = run("mask", path, "-", "--quiet", stdin=b"\xef\xbb\xbfyes\n")
    assert marked.stdout == run("mask", path, "-", stdin=b"yes\n").stdout != b""

    packed = str(tmp_path / "rows.npy")
    assert run("mask", path, "-", "--format", "npy", "-o", packed, stdin=b"yes\nzebra\n").returncode == 0
    rows = np.load(packed)
    want = masks.bitmask(2)
    masks.fill([masks.walk_bytes(b"yes"), masks.ended], want)
    assert np.array_equal(rows, want)


def test_inspect_says_what_was_verified(masks, tmp_path):
    path = tmp_path / "set.ftrie"
    masks.save(str(path))
    assert b"verified" not in run("inspect", path).stdout
    assert b"\nverified checksums of 8 sections\n" in run("inspect", path, "--verify", "-j", 2).stdout
    assert len(json.loads(run("inspect", path, "--verify", "--json").stdout)["verified"]) == 2
    damaged = bytearray(path.read_bytes())
    damaged[80] ^= 1  # in the first section
    path.write_bytes(damaged)
    assert run("inspect", path, "--verify").returncode == 3


def test_ids_of_any_length(masks, tmp_path):
    path = str(tmp_path / "set.ftrie")
    masks.save(path)
    found = run(
        "mask", path, "-", "--ids", "--json", stdin=b"9" * 30 + b"\n" + b"9" * 5000 + b"\n4294967296\n"
    )
    assert found.returncode == 0, found.stderr
    assert [json.loads(line)["state"] for line in found.stdout.splitlines()] == [None] * 3
    for line in (b"-1", b"1_0", "²".encode()):
        assert run("mask", path, "-", "--ids", stdin=line).returncode == 2


def test_mask_command_errors(masks, tmp_path):
    path = str(tmp_path / "set.ftrie")
    masks.save(path)
    for arguments, code, message in [
        (["mask", str(tmp_path / "none.ftrie")], 3, b"cannot be read"),
        (["mask", path, "-", "--ids"], 2, b"-:1: 'x' is not a token id"),
        (["mask", path, "--format", "npy"], 2, b"npy goes to a file"),
        (["mask", path, "--format", "xml"], 2, b"is not one of"),
        (["inspect", path, "--levels"], 2, b"--levels is for token tries"),
    ]:
        found = run(*arguments, stdin=b"x y\n")
        assert found.returncode == code, found.stderr
        assert message in found.stderr
        assert found.stderr.count(b"\n") == 1


def test_escapes():
    assert escaped(b"a\\n\n\t\x00\x7f") == "a\\\\n\\n\\t\\x00\\x7f"
    assert escaped("ö".encode() + b"\xc3") == "ö\\xc3"
    assert byte("a") != piece("a")
