"""Decides an overlap by its sound, before it has words, if a backchannel detector is loaded. Words correct it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from antiphon.contracts import BackchannelDetector
from antiphon.errors import ModelError, Refused
from antiphon.events.transcription import TranscriptionEvent
from antiphon.sessions.transcription.session import TranscriptionSession
from antiphon.turns.overlap import BY_SOUND, OverlapDecider, OverlapState

# Interval in seconds at which new audio is passed to the detector. It has chunks of 40 ms.
HEAR_S = 0.04
# Chunks in a row that have to sound alike to decide.
SURE_CHUNKS = 3

Decide = Callable[[Callable[[], list[TranscriptionEvent]]], Awaitable[None]]


async def hear_overlap(
    detector: BackchannelDetector,
    decider: OverlapDecider,
    decide: Decide,
    turn: int,
    listener: TranscriptionSession,
) -> None:
    """Pass the overlap with this turn to the detector until it is decided, or until the detector fails.

    Speech that sounds like a claim to the floor takes it at once. Speech that sounds like a backchannel is reported as
    one when it stops, and until then does not take the floor before MAX_BACKCHANNEL_S. Its words may still take it.
    """
    stream, heard = detector.open(), None
    num_floor = num_backchannel = 0
    while decider.undecided_turn == turn and decider.state is OverlapState.UNDECIDED:
        new = listener.overlap_audio(heard, detector.frame_samples)
        if new:
            heard = new.end
            try:
                sounds = await stream.feed(new.pcm, new.response)
            except (ModelError, Refused):
                decider.sounds_backchannel = False
                return
            for sound in sounds:
                num_floor = num_floor + 1 if sound.floor >= detector.threshold else 0
                num_backchannel = num_backchannel + 1 if sound.backchannel >= detector.threshold else 0
                if num_floor >= SURE_CHUNKS or num_backchannel >= SURE_CHUNKS:
                    decider.sounds_backchannel = num_backchannel >= SURE_CHUNKS
            if decider.undecided_turn != turn:
                return
            if num_floor >= SURE_CHUNKS and not listener.speakers.is_looked_at(turn):
                await decide(lambda: decider.take_floor(BY_SOUND))
                return
        if decider.sounds_backchannel and not listener.speaking:
            await decide(lambda: decider.decide(speaking=False))
            return
        await anyio.sleep(HEAR_S)
