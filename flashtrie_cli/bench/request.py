"""What a user asks of a benchmark, with the defaults of each workload, recorded in the export."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from flashtrie_cli.errors import UsageError

WORKLOADS = ("auto", "titles", "nar", "head-noise", "index", "build", "masks", "draft")
HEADS = (0, 9, 18, 37, 75, 150, 300, 600)
"""The paper's sweep of coherent slots (appendix K), at beam width 600."""
STEADY_KEYS, STEADY_QUERIES, STEADY_PASSES, STEADY_SECONDS, STEADY_SESSIONS = 20_000, 64, 100, 60.0, 10
STEADY_BATCH = 16
"""Queries a call: enough that the engine's own time is nearly all of it."""


MAX_COUNTS = 1000


@dataclass(frozen=True)
class Request:
    """Everything that a run depends on; None stands for the workload's default."""

    workload: str = "auto"
    systems: tuple[str, ...] | None = None
    beam_widths: tuple[int, ...] | None = None
    top_k: int | None = None
    batch_sizes: tuple[int, ...] = (1,)
    num_queries: int | None = None
    index: str | None = None
    proposals: str | None = None
    targets: str | None = None
    sample_data: str | None = None
    num_keys: tuple[int, ...] | None = None
    profile: str = "titles"
    vocabulary: int | None = None
    seed: int = 0
    heads: tuple[int, ...] | None = None
    alpha: float = 1.0
    token_threshold: float = float("-inf")
    sequence_threshold: float = float("-inf")
    use_eos: bool = False
    threads: int = 1
    passes: int = 10
    seconds: float = 1.0
    sessions: int = 1
    memory: int = 1 << 30

    def checked(self) -> Request:
        """The same, or UsageError for what does not go together."""
        if self.workload not in WORKLOADS:
            raise UsageError(f"workload {self.workload!r} is not one of {', '.join(WORKLOADS)}")
        if self.workload == "index" and not (self.index and self.proposals):
            raise UsageError("--workload index needs --index and --proposals")
        if self.proposals and not self.index:
            raise UsageError("--proposals needs --index")
        if self.index and not self.proposals and self.workload != "nar":
            raise UsageError("--index needs --proposals, or --workload nar, which keeps its keys there")
        for name in ("beam_widths", "batch_sizes", "num_keys"):
            values = getattr(self, name)
            if values is not None and (not values or min(values) < 1):
                raise UsageError(f"{name.replace('_', ' ')} must be at least 1")
        if self.heads is not None and (not self.heads or min(self.heads) < 0):
            raise UsageError("heads must be at least 0")
        if self.passes < 1 or self.sessions < 1 or not self.seconds > 0:
            raise UsageError("passes, sessions and seconds must be above 0")
        return self

    def steady(self) -> Request:
        """Settings for a base or a gate: what is judged and what it is judged by, on an index that fits a core's cache,
        since one that nearly fits is fast or slow by how its pages happen to lie. What was asked for stays."""
        wanted = {
            "workload": "nar",
            "num_keys": (STEADY_KEYS,),
            "num_queries": STEADY_QUERIES,
            "systems": ("cpu", "marisa-opt"),
            "beam_widths": (100,),
            "batch_sizes": (STEADY_BATCH,),
            "passes": STEADY_PASSES,
            "seconds": STEADY_SECONDS,
            "sessions": STEADY_SESSIONS,
        }
        default = Request()
        changes: dict[str, Any] = {
            name: value for name, value in wanted.items() if getattr(self, name) == getattr(default, name)
        }
        if self.workload != "auto":
            changes.pop("num_keys", None)
        return replace(self, **changes)

    @property
    def widths(self) -> tuple[tuple[int, int], ...]:
        """(slots, beam width) pairs; the paper's sweeps have as many slots as beams."""
        default = (600,) if self.workload == "head-noise" else (100, 300)
        return tuple((self.top_k or width, width) for width in self.beam_widths or default)

    def as_json(self) -> dict[str, Any]:
        made = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}
        return {
            name: str(v) if isinstance(v, float) and abs(v) == float("inf") else v for name, v in made.items()
        }

    @classmethod
    def from_json(cls, made: dict[str, Any]) -> Request:
        known = {field.name for field in fields(cls)}
        values: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in made.items() if name in known
        }
        for name in ("token_threshold", "sequence_threshold"):
            values[name] = float(values.get(name, "-inf"))
        return cls(**values)

    def conflicts(self, base: Request) -> list[str]:
        """Fields that this request sets otherwise than the base, apart from those left at their default."""
        default = Request()
        return [
            field.name
            for field in fields(self)
            if getattr(self, field.name) not in (getattr(default, field.name), getattr(base, field.name))
        ]


def parse_counts(text: str, option: str) -> tuple[int, ...]:
    """Whole numbers of "100", "1,8,32", "100:1000:100" (both ends included) or "10k,1M"; UsageError
    otherwise."""
    counts: list[int] = []
    try:
        for part in text.split(","):
            begin, _, rest = part.partition(":")
            if not rest:
                counts.append(_count(begin))
                continue
            end, _, step = rest.partition(":")
            steps = range(_count(begin), _count(end) + 1, _count(step or begin))
            counts.extend(steps[: MAX_COUNTS + 1])
    except (ValueError, OverflowError):
        raise UsageError(
            f"{option} {text!r} is not a list of numbers", hint="100,300 or 100:1000:100"
        ) from None
    if not 0 < len(counts) <= MAX_COUNTS:
        raise UsageError(f"{option} {text!r} names {'more than a thousand' if counts else 'no'} numbers")
    return tuple(dict.fromkeys(counts))


def _count(text: str) -> int:
    scale = {"k": 1_000, "M": 1_000_000, "G": 1_000_000_000}.get(text[-1:], 1)
    return int(float(text[:-1]) * scale) if scale > 1 else int(text)
