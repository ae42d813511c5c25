"""Token masks in plain Python, straight from their definition: the oracle of the other engines."""

from __future__ import annotations

from collections.abc import Iterable

from flashtrie_cli.trie.token_bytes import TokenBytes


class ReferenceMasks:
    """A byte trie of sets and a walk over the whole vocabulary at each question.

    States are byte strings: the path from the root; None is the state after an end-of-sequence token.
    """

    def __init__(
        self,
        members: Iterable[bytes],
        tokens: TokenBytes,
        eos: Iterable[int],
        *,
        added_is_text: bool = True,
    ):
        self.eos = sorted(set(eos))
        self.members = set(members)
        self.paths = {b""} | {member[:end] for member in self.members for end in range(1, len(member) + 1)}
        self.children: dict[bytes, list[bytes]] = {path: [] for path in self.paths}
        for path in self.paths - {b""}:
            self.children[path[:-1]].append(path)
        spelled = tokens.is_text(added_is_text=added_is_text, eos=self.eos)
        self.bytes_of = {token: tokens[token] for token in range(len(tokens)) if spelled[token]}

    def allowed(self, state: bytes | None) -> list[int]:
        """Ids that may come next, ascending."""
        if state is None:
            return []
        found = [token for token, text in self.bytes_of.items() if state + text in self.paths]
        return sorted(found + (self.eos if state in self.members else []))

    def advance(self, state: bytes | None, token: int) -> tuple[bool, bytes | None]:
        """Whether the token is allowed, and the state after it (the same one where it is not)."""
        if state is None:
            return False, state
        if token in self.eos:
            return (True, None) if state in self.members else (False, state)
        if token not in self.bytes_of or state + self.bytes_of[token] not in self.paths:
            return False, state
        return True, state + self.bytes_of[token]

    def forced_bytes(self, state: bytes | None) -> bytes:
        """The longest text that every member from here on goes through."""
        if state is None:
            return b""
        path = state
        while path not in self.members and len(self.children[path]) == 1:
            path = self.children[path][0]
        return path[len(state) :]
