"""antiphon: a self-hosted server for live speech, over protocols that existing clients already use.

`antiphon.Server` runs the server within a program (docs/client.md). `antiphon.client` is the client library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from antiphon.cli.embedded import Server

__version__ = "0.1.0"
__all__ = ["Server", "__version__"]


def __getattr__(name: str) -> Any:
    """Import `Server` on first use: the import takes a second, and a client does not need it."""
    if name == "Server":
        from antiphon.cli.embedded import Server

        return Server
    raise AttributeError(f"module 'antiphon' has no attribute {name!r}")
