"""A SIP port with scripted models on real sockets. Its telephone is `bench.sip_phone.Telephone`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import anyio

from antiphon.server.drain import drain
from antiphon.server.metrics import Metrics
from antiphon.server.sip.agent import SipAgent
from antiphon.server.sip.listening import open_sip
from antiphon.server.state import ServerState
from antiphon.settings import Settings
from tests.server.scripted import Echo, scripted_models


@dataclass(slots=True)
class SipPort:
    """A running SIP port."""

    number: int
    state: ServerState
    echo: Echo
    agent: SipAgent


def settings(**values: Any) -> Settings:
    """Return settings with a SIP port that the system chooses. Names tell which section a value is of."""
    base = Settings()
    own = {name: value for name, value in values.items() if name.startswith("sip")}
    calls = {name: value for name, value in values.items() if name.startswith("telephone")}
    other = {name: value for name, value in values.items() if name not in own | calls}
    return replace(
        base,
        sip=replace(base.sip, **{"sip": "127.0.0.1:0", "sip_codecs": "PCMU", **own}),
        telephone=replace(base.telephone, **calls),
        server=replace(base.server, headroom=False, **other),
    )


@asynccontextmanager
async def port(echo: Echo | None = None, **values: Any) -> AsyncIterator[SipPort]:
    """Serve a SIP port while the block runs, and drain it then."""
    model = echo or Echo()
    state = ServerState(settings(**values), Metrics(), scripted_models(model))
    served = open_sip(state)
    assert served
    async with anyio.create_task_group() as state.group:
        await state.group.start(served.serve)
        await state.group.start(state.listeners.serve)
        try:
            yield SipPort(served.port, state, model, served.agent)
        finally:
            with anyio.CancelScope(shield=True):
                await drain(state, 2.0)
            state.listeners.close()
            state.group.cancel_scope.cancel()
    served.close()
