"""The gate: what is slower is caught through noise, what is the same passes, what is not comparable is refused."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from flashtrie_cli.bench import gate
from flashtrie_cli.bench.run import YARDSTICK
from flashtrie_cli.errors import UsageError


def noisy_case(seed, factor=1.0, *, shared=1.0, passes=100, calls=40):
    """Samples as on a shared machine: calls differ, time slices are lost, and everything is slower for a while."""
    rng = np.random.default_rng(seed)
    cost = np.random.default_rng(99).uniform(0.5, 2.0, calls)
    phase = np.repeat(rng.uniform(1.0, 1.6, passes // 10), 10)[:, None]
    systems = {}
    for name, base in (("cpu", 200e3 * factor * shared), ("marisa-opt", 500e3 * shared), (YARDSTICK, 250e3)):
        samples = base * cost * phase * rng.normal(1, 0.02, (passes, calls)).clip(0.94)
        samples[rng.random((passes, calls)) < 0.08] += 4e6
        systems[name] = {"samples_ns": samples.astype(int).tolist(), "num_calls": calls, "num_passes": passes}
    names = {"workload": "titles", "digest": "d1", "num_slots": 100, "beam_width": 100, "batch_size": 1}
    return {**names, "systems": systems}


@pytest.mark.parametrize("seed", range(10))
def test_a_rerun_passes_and_a_slow_down_fails(seed):
    base = noisy_case(100 + seed)
    (same,) = gate.judge(base, noisy_case(seed))
    (slow,) = gate.judge(base, noisy_case(seed, 1.15))
    assert not same.is_slower(1.10)
    assert slow.is_slower(1.10)
    assert slow.slowdown == pytest.approx(1.15, abs=0.03)
    assert same.noise <= gate.MAX_NOISE


def test_shared_code_getting_slower_is_told():
    (verdict,) = gate.judge(noisy_case(100), noisy_case(3, shared=1.3))
    assert verdict.slowdown == pytest.approx(1, abs=0.03)
    assert verdict.reference_moved


def test_without_a_reference_the_clock_judges():
    base, now = noisy_case(100), noisy_case(3, 1.5)
    for case in (base, now):
        del case["systems"]["marisa-opt"], case["systems"][YARDSTICK]
    (verdict,) = gate.judge(base, now)
    assert verdict.reference is None
    assert verdict.slowdown > 1.3


def test_few_passes_are_one_round():
    case = noisy_case(1, passes=10)
    assert len(gate.rounds(case, "cpu", "marisa-opt")) == 1
    assert len(gate.rounds(noisy_case(1, passes=30), "cpu", "marisa-opt")) == 3


def test_merged_rounds_are_more_rounds():
    both = gate.merged(noisy_case(1), noisy_case(2))
    assert len(gate.rounds(both, "cpu", "marisa-opt")) == 20


def record(**changes):
    made = {
        "environment": {"cpu": "a", "gpu": {"name": "H"}},
        "options": {"threads": 1, "alpha": 1.0},
        "cases": [noisy_case(1)],
    }
    made["environment"].update(changes.pop("environment", {}))
    made["options"].update(changes.pop("options", {}))
    return made


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": {"cpu": "b"}}, "on cpu 'a', this run on 'b'"),
        ({"environment": {"gpu": {"name": "A"}}}, "gpu"),
        ({"options": {"threads": 2}}, "other options \\(threads\\)"),
    ],
)
def test_refuses_other_machines_and_options(changes, message):
    with pytest.raises(UsageError, match=message):
        gate.check_comparable(record(), record(**changes))
    gate.check_comparable(record(), record())


def test_refuses_other_indexes_and_cases():
    base = record()
    other = copy.deepcopy(base["cases"][0])
    other["digest"] = "d2"
    with pytest.raises(UsageError, match="another index"):
        gate.matching_case(base, other)
    other["beam_width"] = 7
    with pytest.raises(UsageError, match="no case"):
        gate.matching_case(base, other)
