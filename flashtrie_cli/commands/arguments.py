"""Values of options and arguments, converted without pydantic where they are plain.

Typer imports it for the first value that it converts, which takes longer (100 to 360 ms) than all else that a command
does before its work. What is not plain, or not valid, goes typer's way, and gets typer's message; and a typer that is
built otherwise is left alone.
"""

from __future__ import annotations

import re
from typing import Any

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}(\.[0-9]{1,18})?")
_NOT_PLAIN = object()


def convert_plainly(command: Any) -> None:
    """Makes the parameters of a command of typer's, --help among them, convert plain values by themselves."""
    all_of = command.get_params

    def get_params(context: Any) -> Any:
        parameters = all_of(context)
        for parameter in parameters:
            if getattr(parameter, "_runtime_param", parameter) is None and hasattr(
                parameter, "type_descriptor"
            ):
                parameter._runtime_param = _PlainParameter(parameter.type_descriptor)
        return parameters

    command.get_params = get_params


class _PlainParameter:
    """In the place of what typer would have made of the parameter."""

    def __init__(self, descriptor: Any):
        self._descriptor = descriptor

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value of a parameter, whose errors are typer's."""
        plain = _plain(value, self._descriptor, is_list=param.multiple or param.nargs == -1)
        if plain is not _NOT_PLAIN:
            return plain
        from typer._coercion import build_runtime_param

        return build_runtime_param(self._descriptor).coerce(value, param=param, ctx=ctx)


def _plain(value: Any, descriptor: Any, *, is_list: bool) -> Any:
    kind, info = descriptor.annotation, descriptor.parameter_info
    if info.parser is not None or descriptor.is_path or descriptor.is_choice or descriptor.is_file:
        return _NOT_PLAIN
    if is_list:
        if value is None:
            return ()
        texts = (
            kind == list[str] and isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value)
        )
        return list(value) if texts else _NOT_PLAIN
    if (
        value is None
        or (kind is str and isinstance(value, str))
        or (kind is bool and isinstance(value, bool))
    ):
        return value
    if kind is int and type(value) is str and _INTEGER.fullmatch(value):
        value = int(value)
    elif kind is float and type(value) is str and _NUMBER.fullmatch(value):
        value = float(value)
    if type(value) is not kind or kind not in (int, float):
        return _NOT_PLAIN
    is_within = (info.min is None or value >= info.min) and (info.max is None or value <= info.max)
    return value if is_within else _NOT_PLAIN
