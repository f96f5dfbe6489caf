"""An inbox measures its backlog in seconds of audio and in bytes of memory."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.events.conversation import CancelResponse, ConversationCommand
from antiphon.events.size import num_bytes
from antiphon.events.transcription import AppendAudio, TranscriptionCommand
from antiphon.sessions.inbox import BYTES_PER_SAMPLE, COMMAND_SAMPLES, Inbox


@pytest.mark.parametrize(
    ("command", "samples"),
    [
        (AppendAudio(np.zeros(1600, np.float32)), 1600),
        (AppendAudio(np.zeros(0, np.float32)), 0),
        (CancelResponse("r" * 10_000), COMMAND_SAMPLES + num_bytes(CancelResponse("r" * 10_000)) // BYTES_PER_SAMPLE),
    ],
)
def test_a_command_counts_until_it_is_read(command: TranscriptionCommand | ConversationCommand, samples: int) -> None:
    async def play() -> None:
        inbox = Inbox(10)
        await inbox.put(command)
        assert (inbox.num_bytes, inbox.backlog_s) == (num_bytes(command), samples / SAMPLE_RATE_HZ)
        assert await inbox.get() is command
        assert (inbox.num_bytes, inbox.backlog_s) == (0, 0)

    asyncio.run(play())
