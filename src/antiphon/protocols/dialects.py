"""The table of the dialects of realtime sessions. A new one is a folder, and a line here: docs/add-a-dialect.md."""

from __future__ import annotations

from importlib import import_module

from antiphon.protocols.connection import Dialect
from antiphon.protocols.opening import Opening

# Modules with a DIALECT each. The first whose `matches` is true is taken, so the one that takes anything is the last.
_MODULES = (
    "bridges.minicpmo_worker",
    "bridges.omni",
    "bridges.openbmb",
    "duplex.connection",
    "negotiation",
)
DIALECTS: tuple[Dialect, ...] = tuple(import_module(f"antiphon.protocols.{name}").DIALECT for name in _MODULES)


def dialect_of(opening: Opening) -> Dialect:
    """The dialect that an opening asks for."""
    return next(dialect for dialect in DIALECTS if dialect.matches(opening))


def dialect_named(name: str) -> Dialect:
    """The dialect of a stored session. Raises KeyError where there is none of this name."""
    return {dialect.name: dialect for dialect in DIALECTS}[name]
