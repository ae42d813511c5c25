"""flashtrie: tries as the constraint of what a model may say.

``Index`` opens an index and questions it, ``build_index`` makes one; ``TokenMasks`` says what a model may say next, and
``build_draft_trees`` drafts. All are imported at first use, so that the command line starts at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashtrie_cli.build import BuildOptions, build_index
    from flashtrie_cli.index import Index
    from flashtrie_cli.query.draft import build_draft_trees
    from flashtrie_cli.query.plan import SearchPlan
    from flashtrie_cli.query.token_masks import TokenMasks

__version__ = "0.1.0"

__all__ = [
    "BuildOptions",
    "Index",
    "SearchPlan",
    "TokenMasks",
    "__version__",
    "build_draft_trees",
    "build_index",
]

_HOMES = {
    "BuildOptions": "flashtrie_cli.build",
    "build_draft_trees": "flashtrie_cli.query.draft",
    "build_index": "flashtrie_cli.build",
    "Index": "flashtrie_cli.index",
    "SearchPlan": "flashtrie_cli.query.plan",
    "TokenMasks": "flashtrie_cli.query.token_masks",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
