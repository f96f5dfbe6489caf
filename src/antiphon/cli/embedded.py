"""The server within a program: what `antiphon serve` does, in the program's own event loop."""

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
    """A server in this process. Entered with `async with`, which waits until its models are loaded, and fetches what is
    missing of them; left, it drains.

    `options` are settings by their names of docs/settings.md; variables of the environment count where they are not
    given. The port is one that is free unless one is given. `url` is where it is reached. It takes threads of its own
    for models, and no signals: those are the program's. Raises SettingsError for what is no setting, or does not fit.
    """

    def __init__(self, *, fetches: bool = True, settings: Settings | None = None, **options: Any) -> None:
        """`fetches` false: what is missing of the models is an error. `settings`: in place of `options`."""
        self._settings = settings or load({"port": 0, **options}, os.environ)
        check_exposure(self._settings)
        self._fetches = fetches
        self._stop, self._now = anyio.Event(), anyio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._app: App | None = None
        self.url = ""

    async def __aenter__(self) -> Server:
        """Start to serve. Raises SettingsError, StoreError and ModelError."""
        server = self._settings.server
        with ExitStack() as unless_served:
            bound = unless_served.enter_context(bind(server.host, server.port))
            settings = await asyncio.to_thread(prepare_to_serve, self._settings, fetches=self._fetches)
            ready = asyncio.get_running_loop().create_future()

            def told(url: str) -> None:
                self.url = url
                ready.set_result(None)

            # From here on the socket is the server's.
            unless_served.pop_all()
            ends = (self._stop, self._now)
            self._serving = asyncio.create_task(serve(settings, told, bound, ends, on_app=self._serves))
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
        """Return a client of this server, with one of its keys. Its sessions go through no socket, unless it is to
        reach the server `over_network` as others do. `options`: as of Client.
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
