"""GET /ready of a server whose language model runs on another server."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from antiphon.loading.loaded import LoadedModels
from antiphon.remote.address import parse_address
from antiphon.remote.chat.language import RemoteLanguageModel
from antiphon.server.routes.health import ready
from antiphon.settings import RemoteSettings
from tests.scripted import ScriptedDetector, ScriptedTranscriber


@pytest.mark.parametrize("is_away", [True, False])
def test_a_language_model_that_is_away_leaves_the_server_ready_and_is_named(is_away: bool) -> None:
    # No server listens at this address.
    language = RemoteLanguageModel(parse_address("http://127.0.0.1:9/v1#m", "--language-model"), "", RemoteSettings())
    language.pool.all[0].is_away = is_away
    others: Any = dict.fromkeys(("turn_detector", "synthesizer", "image_reader", "conversation_model", "video_model"))
    hears = {"transcriber": ScriptedTranscriber(), "vad": ScriptedDetector()}
    models = LoadedModels(**others, **hears, language_model=language, names={}, lanes=())
    state: Any = SimpleNamespace(admission=SimpleNamespace(draining=False, num_sessions=0), models=models)
    app = SimpleNamespace(state=SimpleNamespace(antiphon=state))
    answer = asyncio.run(ready(Request({"type": "http", "app": app})))
    body = json.loads(bytes(answer.body))
    assert (answer.status_code, body["status"]) == (200, "ready")
    assert body["serves"] == ["captions", "conversation", "duplex"]
    assert body.get("degraded", {}).keys() == ({"language"} if is_away else set())
