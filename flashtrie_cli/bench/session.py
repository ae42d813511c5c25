"""One run of `flashtrie bench` from request to record: workloads made, measured, judged against a base."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flashtrie_cli.bench import gate, record
from flashtrie_cli.bench.environment import environment
from flashtrie_cli.bench.measure import Effort
from flashtrie_cli.bench.request import HEADS, Request
from flashtrie_cli.bench.run import Settings, new_record, run
from flashtrie_cli.bench.systems import choose_systems
from flashtrie_cli.bench.workloads import (
    Workload,
    find_sample_data,
    level_rows,
    own_index,
    sample_titles,
    synthetic,
)
from flashtrie_cli.engine.cpu import is_available as native_available
from flashtrie_cli.errors import EngineUnavailable, InputError, UsageError
from flashtrie_cli.query.plan import SearchPlan

Watch = Callable[[str, float], None]


@dataclass
class Session:
    """A benchmark over searches. ``watch(what, share)`` is told how far it is, ``say`` what it chose."""

    request: Request
    export: str | None = None
    watch: Watch = lambda what, share: None
    say: Callable[[str], None] = lambda text: None
    made: dict[str, Any] = field(default_factory=dict)
    """The record so far, also after an interrupt."""

    def run(self) -> dict[str, Any]:
        """Measure everything asked for. Raises FlashtrieErrors; on KeyboardInterrupt `made` keeps finished cases."""
        if not native_available():
            raise EngineUnavailable(
                "a benchmark needs the native engine", hint="reinstall where a C++20 compiler is found"
            )
        self._check()
        request = replace(self.request, workload=self._chosen()).checked()
        self.made = new_record(_settings(request))
        self.made["request"] = request.as_json()
        self._measure(request, self.made)
        for _ in range(1, request.sessions):
            self._add_session(request)
        return self.made

    def _check(self) -> None:
        """What can be wrong with systems and limits is said before anything is."""
        choose_systems(self.request.systems)
        settings = _settings(self.request)
        for _, width in settings.widths:
            SearchPlan(beam_width=width, **settings.plan)

    def _measure(self, request: Request, into: dict[str, Any]) -> None:
        """One session: workloads made and opened anew, every case measured into a record."""
        systems = choose_systems(request.systems)
        settings = _settings(request)
        heads = request.heads or HEADS if _sweeps(request) else (0,)
        cases = len(settings.widths) * len(settings.batch_sizes) * len(heads)
        with tempfile.TemporaryDirectory(prefix="flashtrie-bench-") as scratch:
            workloads = self._workloads(request, scratch)
            run(workloads, systems, settings, into, total_cases=cases, watch=self.watch, save=self._save)

    def _add_session(self, request: Request) -> None:
        """Measure again, and put the samples behind those that are there."""
        again = new_record(_settings(request))
        self._measure(request, again)
        pairs = zip(self.made["cases"], again["cases"], strict=True)
        self.made["cases"] = [gate.merged(case, more) for case, more in pairs]
        self._save()

    def _save(self) -> None:
        if self.export is not None:
            record.save(self.made, self.export)

    def _chosen(self) -> str:
        """The workload asked for; `auto` takes the user's index, else the titles, else synthetic keys, and
        says so."""
        if self.request.workload != "auto":
            return self.request.workload
        if self.request.index and self.request.proposals:
            return "index"
        if find_sample_data(self.request.sample_data) is None:
            self.say("no sample data here: measuring synthetic keys (--workload nar)")
            return "nar"
        try:
            import tokenizers  # noqa: F401
        except ImportError:
            self.say("the library tokenizers is not installed: measuring synthetic keys (--workload nar)")
            return "nar"
        self.say("measuring the sample data (--workload titles)")
        return "titles"

    def _workloads(self, request: Request, scratch: str) -> Iterator[Workload]:
        if not _sweeps(request):
            yield self._workload(request, request.workload, scratch)
            return
        if request.index and request.proposals:
            plain = self._workload(request, "index", scratch)
        else:
            plain = self._workload(request, "titles", scratch)
        num_slots = max(slots for slots, _ in request.widths)
        for head in request.heads or HEADS:
            yield plain.with_head(head, num_slots)

    def _workload(self, request: Request, name: str, scratch: str) -> Workload:
        def say(text: str) -> None:
            self.watch(text, 0.0)

        common: dict[str, Any] = {"engine": "cpu", "threads": request.threads}
        if name == "titles":
            directory = find_sample_data(request.sample_data)
            if directory is None:
                raise InputError(
                    "there is no sample_data here", hint="run in the checkout, or use --workload nar"
                )
            return sample_titles(
                Path(directory), scratch, num_queries=request.num_queries or 1 << 20, say=say, **common
            )
        if name == "index":
            assert request.index is not None
            assert request.proposals is not None
            return own_index(
                request.index, request.proposals, targets=request.targets,
                num_queries=request.num_queries or 1 << 20, **common,
            )  # fmt: skip
        if request.num_keys is not None and len(request.num_keys) != 1:
            raise UsageError("--keys takes several numbers for --workload build only")
        made = synthetic(
            scratch,
            num_keys=(request.num_keys or (200_000,))[0],
            num_queries=request.num_queries or 64,
            num_slots=max(slots for slots, _ in request.widths),
            profile=request.profile,
            vocabulary=request.vocabulary,
            seed=request.seed,
            keep=request.index,
            memory=request.memory,
            say=say,
            **common,
        )
        self.made["levels"] = level_rows(made.index)
        return made

    def judge(self, base: dict[str, Any], max_slowdown: float) -> list[gate.Verdict]:
        """Verdicts on all cases, after one session; while a case looks too slow, further ones, as many as the base had.

        Raises UsageError for a base that cannot be compared with, before it measures.
        """
        gate.check_comparable(
            base, {"environment": environment(), "options": _settings(self.request).describe()}
        )
        most = self.request.sessions
        self.request = replace(self.request, sessions=1)
        self.run()
        for number in range(2, most + 2):
            verdicts = self._verdicts(base)
            if number > most or not any(verdict.looks_slower(max_slowdown) for verdict in verdicts):
                break
            self.say(f"looks slower than the base: session {number} of at most {most}")
            self._add_session(Request.from_json(self.made["request"]))
        return verdicts

    def _verdicts(self, base: dict[str, Any]) -> list[gate.Verdict]:
        cases = self.made["cases"]
        threads = self.made["options"]["threads"]
        return [
            verdict
            for case in cases
            for verdict in gate.judge(gate.matching_case(base, case), case, threads=threads)
        ]


def _sweeps(request: Request) -> bool:
    return request.workload == "head-noise"


def _settings(request: Request) -> Settings:
    return Settings(
        widths=request.widths,
        batch_sizes=request.batch_sizes,
        threads=request.threads,
        effort=Effort(request.passes, request.seconds),
        plan={
            "alpha": request.alpha,
            "token_threshold": request.token_threshold,
            "sequence_threshold": request.sequence_threshold,
        },
        use_eos=request.use_eos,
    )
