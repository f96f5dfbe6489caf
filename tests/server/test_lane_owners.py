"""The owner of a lane's job is the API key whose session or request submits it."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import replace

from antiphon.settings import Settings
from antiphon.shares.places import current_owner
from tests.attack.doors import as_key
from tests.scripted import ScriptedTranscriber, speech
from tests.server.clients import connect
from tests.server.scripted import serving

MANUAL_TURNS = {"type": "transcription", "audio": {"input": {"turn_detection": None}}}


def test_when_two_keys_have_sessions_then_the_windows_of_each_are_its_own() -> None:
    seen: set[tuple[Hashable, int]] = set()
    transcriber = ScriptedTranscriber(gate=lambda window: seen.add((current_owner.get(), round(window.pcm[0] * 1000))))
    settings = Settings()
    settings = replace(settings, server=replace(settings.server, api_keys=("alice", "bob")))

    async def main(ws: str) -> None:
        async with (
            connect(ws, "?intent=transcription", additional_headers=as_key("alice")) as alice,
            connect(ws, "?intent=transcription", additional_headers=as_key("bob")) as bob,
        ):
            for wire, first in ((alice, 1), (bob, 5)):
                await wire.say("session.update", session=MANUAL_TURNS)
                await wire.sound(speech(first, 3), 24_000)
                await wire.say("input_audio_buffer.commit")
            for wire in (alice, bob):
                await wire.until("transcription.completed")

    with serving(settings, transcriber) as (ws, *_):
        asyncio.run(main(ws))
    assert {owner for owner, _ in seen} == {"alice", "bob"}
    assert len(seen) == 2
