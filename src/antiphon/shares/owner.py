"""Whose work it is that a task or thread does."""

from __future__ import annotations

from collections.abc import Hashable
from contextvars import ContextVar

# The API key of a request or session, "" without one: set once, and inherited by its tasks and threads. None: the
# server's own work.
current_owner: ContextVar[Hashable] = ContextVar("owner", default=None)
