"""Pictures of a record, in the style of the FlashTrie paper's figures 2 to 5. Needs matplotlib (an extra)."""

from __future__ import annotations

import os
from typing import Any

from flashtrie_cli.bench.run import YARDSTICK
from flashtrie_cli.bench.systems import OURS
from flashtrie_cli.errors import OutputError, UsageError

COLOURS = {
    "cpu": "#1b6ca8",
    "cuda": "#0f8b5f",
    "marisa-opt": "#d1495b",
    "marisa-int": "#8d5a97",
    "flashtrie-paper": "#e08e45",
    "ppt": "#7f7f7f",
    "linear-probe": "#b39c4d",
    "two-pointer": "#6d8a96",
    "per-child": "#a44a3f",
    "hash-transitions": "#4f6d7a",
    "flashtrie": "#1b6ca8",
    "marisa-trie": "#d1495b",
}
FORMATS = ("svg", "png")


def check_plots(directory: str) -> None:
    """Refuse, before any work, pictures that could not be drawn: UsageError without matplotlib, OutputError where the
    directory cannot be made."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("--plots needs matplotlib", hint="pip install 'flashtrie[plots]'") from None
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot be made: {error.strerror}", file=directory) from error


def draw(record: dict[str, Any], directory: str) -> list[str]:
    """Draw what the record has data for, as SVG and PNG in ``directory``; returns the PNGs. Raises as `check_plots`."""
    check_plots(directory)
    import matplotlib

    matplotlib.use("Agg")
    figures = {}
    if "builds" in record:
        figures["build"] = _build(record["builds"])
    else:
        for name, cases in _by_workload(record).items():
            widths = sorted({case["beam_width"] for case in cases})
            if len(widths) > 1:
                figures[f"latency-{name}"] = _latency(
                    name, [c for c in cases if c["batch_size"] == cases[0]["batch_size"]]
                )
            if len({case["batch_size"] for case in cases}) > 1:
                figures[f"throughput-{name}"] = _throughput(name, cases)
        if any(case["head"] is not None for case in record["cases"]):
            figures["head-noise"] = _head_noise(record["cases"])
    return [
        _save(figure, os.path.join(directory, name.replace(" ", "-"))) for name, figure in figures.items()
    ]


def _save(figure: Any, stem: str) -> str:
    for kind in FORMATS:
        figure.savefig(f"{stem}.{kind}", dpi=150)
    import matplotlib.pyplot as plt

    plt.close(figure)
    return f"{stem}.png"


def _by_workload(record: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    grouped: dict[str, list[dict[str, Any]]] = {}
    for case in record["cases"]:
        if case["head"] is None:
            grouped.setdefault(case["workload"], []).append(case)
    return grouped


def _panels(title: str) -> tuple[Any, Any, Any]:
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    figure.suptitle(title, fontsize=11)
    for axes in (left, right):
        axes.grid(True, which="major", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, left, right


def _names(cases: list[dict[str, Any]]) -> list[str]:
    return [name for name in cases[0]["systems"] if name != YARDSTICK]


def _latency(workload: str, cases: list[dict[str, Any]]) -> Any:
    """Figures 3 and 5: mean (solid) and p95 (dashed) over the beam width; how many times ours the others
    take."""
    batch = cases[0]["batch_size"]
    figure, left, right = _panels(f"{workload}: latency over the beam width (K = B), {batch} a call")
    widths = [case["beam_width"] for case in cases]
    for name in _names(cases):
        latency = [case["systems"][name]["latency_us"] for case in cases]
        colour = COLOURS.get(name)
        left.plot(widths, [one["mean"] / 1e3 for one in latency], "o-", color=colour, label=f"{name} (mean)")
        left.plot(widths, [one["p95"] / 1e3 for one in latency], "--", color=colour, alpha=0.7)
    left.set(xlabel="beam width", ylabel="milliseconds", title="mean solid, p95 dashed")
    left.legend(fontsize=8, frameon=False)
    for axes in (left, right):
        axes.set_xticks(widths)
    ours = next(name for name in (*reversed(OURS), *_names(cases)) if name in cases[0]["systems"])
    for name in _names(cases):
        pairs = [
            (c["beam_width"], r) for c in cases for r in c["ratios"] if r["of"] == name and r["to"] == ours
        ]
        if not pairs:
            continue
        x = [width for width, _ in pairs]
        right.plot(x, [r["ratio"] for _, r in pairs], "o-", color=COLOURS.get(name), label=f"{name} / {ours}")
        right.fill_between(
            x, [r["low"] for _, r in pairs], [r["high"] for _, r in pairs], color=COLOURS.get(name), alpha=0.2
        )
    right.set(
        xlabel="beam width",
        ylabel=f"times {ours}",
        title="ratio, 95 % interval",
    )
    right.legend(fontsize=8, frameon=False)
    _scale(left, right)
    return figure


def _throughput(workload: str, cases: list[dict[str, Any]]) -> Any:
    """Figure 4, right: queries a second over the beam width, for three batch sizes; beside it over the batch size, for
    the least and the largest beam width."""
    figure, left, right = _panels(f"{workload}: throughput")
    batches = sorted({case["batch_size"] for case in cases})
    widths = sorted({case["beam_width"] for case in cases})
    at = {(case["beam_width"], case["batch_size"]): case for case in cases}
    styles = (":", "--", "-")
    shown = sorted({batches[0], batches[len(batches) // 2], batches[-1]})
    for name in _names(cases):
        for style, batch in zip(styles[-len(shown) :], shown, strict=True):
            line = [(w, at[w, batch]["systems"][name]["queries_per_s"]) for w in widths if (w, batch) in at]
            label = f"{name}, {batch} a call"
            left.plot(*zip(*line, strict=True), style, marker="o", ms=3, color=COLOURS.get(name), label=label)
        for style, width in zip(("-", "--"), sorted({widths[0], widths[-1]}), strict=False):
            line = [(b, at[width, b]["systems"][name]["queries_per_s"]) for b in batches if (width, b) in at]
            label = f"{name}, B = {width}"
            right.plot(
                *zip(*line, strict=True), style, marker="o", ms=3, color=COLOURS.get(name), label=label
            )
    left.set(xlabel="beam width", ylabel="queries/s", title="by beam width")
    right.set(xlabel="queries a call", ylabel="queries/s", title="by batch size")
    right.set_xscale("log", base=2)
    right.set_xticks(batches, [str(batch) for batch in batches])
    left.set_xticks(widths)
    for axes in (left, right):
        axes.legend(
            fontsize=7,
            frameon=False,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.14),
            ncols=2,
            handlelength=4,
        )
    _scale(left, right)
    return figure


def _head_noise(cases: list[dict[str, Any]]) -> Any:
    """The sweep of appendix K: mean latency and ratio over the number of coherent slots kept."""
    noisy = sorted((case for case in cases if case["head"] is not None), key=lambda case: case["head"])
    figure, left, right = _panels(f"noise behind the best r slots, K = B = {noisy[0]['beam_width']}")
    heads = [case["head"] for case in noisy]
    places = range(len(heads))
    for name in _names(noisy):
        means = [case["systems"][name]["latency_us"]["mean"] / 1e3 for case in noisy]
        left.plot(places, means, "o-", color=COLOURS.get(name), label=name)
    ours = next(name for name in (*reversed(OURS), *_names(noisy)) if name in noisy[0]["systems"])
    for name in _names(noisy):
        ratios = [r["ratio"] for case in noisy for r in case["ratios"] if r["of"] == name and r["to"] == ours]
        if ratios:
            right.plot(places, ratios, "o-", color=COLOURS.get(name), label=f"{name} / {ours}")
    for axes, label in ((left, "mean milliseconds"), (right, f"times {ours}")):
        axes.set_xticks(list(places), [str(head) for head in heads])
        axes.set(xlabel="slots kept, r (0: all noise)", ylabel=label)
        axes.legend(fontsize=8, frameon=False)
    _scale(left, right)
    return figure


def _build(builds: list[dict[str, Any]]) -> Any:
    """Figure 2: build time and index size over the number of keys."""
    figure, left, right = _panels("building an index")
    for name in dict.fromkeys(row["builder"] for row in builds):
        rows = sorted((row for row in builds if row["builder"] == name), key=lambda row: row["num_keys"])
        keys = [row["num_keys"] for row in rows]
        left.plot(keys, [row["seconds"] for row in rows], "o-", color=COLOURS.get(name), label=name)
        sizes = [row["index_bytes"] / 1e6 for row in rows]
        right.plot(keys, sizes, "o-", color=COLOURS.get(name), label=name)
    for axes, label in ((left, "seconds"), (right, "index on disk, MB")):
        axes.set(xlabel="keys", ylabel=label, xscale="log")
        axes.legend(fontsize=8, frameon=False)
        axes.set_xticks(keys, [f"{key:,}" for key in keys], fontsize=8)
        axes.minorticks_off()
    _scale(left, right)
    return figure


def _scale(*axes: Any) -> None:
    """Logarithmic where values span more than a decade, else linear from 0; numbers written out."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    for one in axes:
        values = [y for line in one.get_lines() for y in line.get_ydata() if y > 0]
        if values and max(values) > 10 * min(values):
            one.set_yscale("log")
            one.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            one.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
        else:
            one.set_ylim(0, 1.15 * max(values, default=1))
        one.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
