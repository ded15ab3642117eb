"""Whether values that come from JSON are of the types that dataclasses name for their fields.

Knows the types of messages and of settings: numbers, texts, None, unions, tuples, frozensets and mappings. A whole
number will do for a float, and True is no number.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any

_UNIONS = (types.UnionType, typing.Union)


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """By name, of a dataclass or a named tuple."""
    names = cls.__dataclass_fields__ if dataclasses.is_dataclass(cls) else cls._fields
    return {name: hint for name, hint in typing.get_type_hints(cls).items() if name in names}


def check_fields(cls: type, values: Mapping[str, Any]) -> None:
    """Raises TypeError for a value that is not of the type of its field. Fields that are missing are not looked at."""
    for name, value in values.items():
        if name in field_types(cls):
            check_type(name, field_types(cls)[name], value)


def check_type(name: str, hint: Any, value: Any) -> None:
    """Raises TypeError."""
    if not fits(hint, value):
        raise TypeError(f"{name} is {value!r:.60}")


def fits(hint: Any, value: Any) -> bool:
    """Whether the value is of this type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in _UNIONS:
        return any(fits(argument, value) for argument in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and _tuple_fits(arguments, value)
    if origin is dict:
        of_key, of_value = arguments
        return isinstance(value, dict) and all(fits(of_key, k) and fits(of_value, v) for k, v in value.items())
    if origin is frozenset:
        return isinstance(value, frozenset) and all(fits(arguments[0], item) for item in value)
    if hint in (int, float):
        return isinstance(value, hint | int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _tuple_fits(hints: tuple[Any, ...], value: tuple[Any, ...]) -> bool:
    if hints[-1] is Ellipsis:
        return all(fits(hints[0], item) for item in value)
    return len(hints) == len(value) and all(map(fits, hints, value))
