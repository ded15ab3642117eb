"""Records: what is made once and never changed, such as messages, by the million.

A dataclass that is frozen at run time takes four times as long to make, since each of its fields is set around its own
guard. So here types are frozen (type checkers tell of a change) and objects are not; a simulation with --check asserts
that no actor has changed a message that it was given.
"""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """A dataclass with slots that can be compared, hashed and pickled, and is not to be changed."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
