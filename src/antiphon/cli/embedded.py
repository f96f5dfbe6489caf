"""The server within a program: the same as `antiphon serve`, on the program's own event loop."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import anyio

from antiphon.cli.preparation import prepare_to_serve
from antiphon.client import Client
from antiphon.client.in_process import App
from antiphon.errors import ModelError
from antiphon.server.http.listening import bind
from antiphon.server.run import check_exposure, serve
from antiphon.settings import Settings, load


class Server:
    """A server in this process. It is entered with `async with`, which waits until the models are loaded; at the end of
    the block the server drains.

    It runs models on threads of its own. It installs no signal handlers; those are the program's.

    Args:
        fetches: Whether to fetch missing model files. False: a missing file is an error.
        settings: All settings, instead of `options`.
        **options: Settings by their names in docs/settings.md. A setting that is not given is read from the
            environment. `port` is a free port unless it is given.

    Attributes:
        url: The server's address; "" until it is ready.

    Raises:
        SettingsError: A setting is unknown, or its value is invalid.
    """

    def __init__(self, *, fetches: bool = True, settings: Settings | None = None, **options: Any) -> None:
        """Read the settings. Does not start anything."""
        self._settings = settings or load({"port": 0, **options}, os.environ)
        check_exposure(self._settings)
        self._fetches = fetches
        self._stop, self._now = anyio.Event(), anyio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._app: App | None = None
        self.url = ""

    async def __aenter__(self) -> Server:
        """Fetch and load the models, start serving, and return the server.

        Raises:
            SettingsError: A setting does not fit this machine, such as a device or a port.
            StoreError: A model's file is missing, damaged or cannot be fetched.
            ModelError: A model cannot be loaded, or the server ended before it was ready.
        """
        server = self._settings.server
        with ExitStack() as unless_served:
            bound = unless_served.enter_context(bind(server.host, server.port))
            settings = await asyncio.to_thread(prepare_to_serve, self._settings, fetches=self._fetches)
            ready = asyncio.get_running_loop().create_future()

            def report(url: str) -> None:
                self.url = url
                ready.set_result(None)

            # From here on the server owns the socket.
            unless_served.pop_all()
            ends = (self._stop, self._now)
            self._serving = asyncio.create_task(serve(settings, report, bound, ends, on_app=self._serves))
            try:
                await asyncio.wait({ready, self._serving}, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                await self._end()
                raise
            if not ready.done():
                await self._serving
                raise ModelError("the server ended before it was ready")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    def client(self, *, over_network: bool = False, **options: Any) -> Client:
        """Return a client of this server that uses its first API key.

        Args:
            over_network: Whether to connect through a socket, as other clients do. False: the client calls the server
                directly, in this process.
            **options: The options of `Client`.
        """
        keys = self._settings.server.api_keys
        return Client(self.url, keys[0] if keys else None, app=None if over_network else self._app, **options)

    def _serves(self, app: App) -> None:
        self._app = app

    async def _end(self) -> None:
        self._stop.set()
        if self._serving:
            await self._serving
        self._app = None
