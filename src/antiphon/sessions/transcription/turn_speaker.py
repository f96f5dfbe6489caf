"""Whose voice each turn is: the user's of the session, or another's near the microphone."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio
import anyio.abc

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts.speaker import SpeakerModel
from antiphon.errors import ModelError, Refused
from antiphon.events.transcription import EnrolledVoice, TranscriptionConfig
from antiphon.shares.threads import in_thread
from antiphon.turns.segmenter import Segmenter
from antiphon.turns.voices.enrolment import enrolment_takes
from antiphon.turns.voices.primary_speaker import (
    EARLY_LOOKS_S,
    PrimarySpeaker,
    SpeakerVerdict,
    TurnSpeaker,
)

log = logging.getLogger(__name__)

# The seconds of a turn that are judged, from its beginning.
MAX_VOICE_S = 10.0
# Bound: verdicts of turns that nobody has asked for.
MAX_VERDICTS = 64
UNDECIDED = SpeakerVerdict(TurnSpeaker.UNDECIDED)


class TurnSpeakers:
    """Judges the turns of one session by their voices, in tasks beside the listening.

    - `model`: the speaker encoder; None: nobody is judged.
    - `on_other`: is awaited with a turn that goes on, once it is known to be another's voice.
    - `is_on`: whether turns are judged; public to read.

    Used from one event loop. A failure of the encoder leaves a turn undecided, which counts as the user's.
    """

    def __init__(
        self, model: SpeakerModel | None, segmenter: Segmenter, on_other: Callable[[int], Awaitable[None]] | None
    ) -> None:
        self._model = model
        self._segmenter = segmenter
        self._on_other = on_other
        self.is_on = False
        self._primary: PrimarySpeaker | None = None
        self._config: tuple[str, tuple[EnrolledVoice, ...]] = ("off", ())
        # The turn that is open, its speech so far, and how many early looks it has had.
        self._turn: tuple[int, Pcm] | None = None
        self._num_looks = 0
        # The turn that an early look took for another's voice, and the looks under way, with what they are of.
        self._other_turn: int | None = None
        self._looking: dict[object, int] = {}
        self._verdicts: dict[int, SpeakerVerdict] = {}
        self._pending: dict[int, anyio.Event] = {}

    def configure(self, config: TranscriptionConfig) -> None:
        """Judge by this configuration. A voice that was learned is forgotten where the mode or the voices change."""
        wanted = (config.primary_speaker, config.enrolled_voices)
        if self._model is None or wanted == self._config:
            return
        self._config, self._primary = wanted, None
        if config.primary_speaker != "off":
            self._primary = PrimarySpeaker(config.primary_speaker, self._model.profile, config.enrolled_voices)
        self.is_on = self._primary is not None

    def follow(self, group: anyio.abc.TaskGroup) -> None:
        """Look at the turn that is open, after audio was added. Early looks run in tasks of `group`."""
        if self._primary is None or self._model is None:
            return
        window = self._segmenter.window
        if window is None or window.spans[-1].end is not None:
            return
        span = window.spans[-1]
        start = max(0, span.start - window.start) + self._segmenter.prefix_samples * span.first
        end = window.end if window.quiet_since is None else window.quiet_since
        speech = window.pcm[start : max(start, end - window.start)]
        if self._turn is None or self._turn[0] != span.turn:
            self._num_looks = 0
        self._turn = (span.turn, speech)
        if self._num_looks < len(EARLY_LOOKS_S) and len(speech) >= EARLY_LOOKS_S[self._num_looks] * SAMPLE_RATE_HZ:
            self._num_looks += 1
            if self._primary.knows_user:
                look = object()
                self._looking[look] = span.turn
                group.start_soon(self._look, self._primary, self._model, look, speech)

    def end_turn(self, turn: int, group: anyio.abc.TaskGroup) -> None:
        """A turn has ended: it is judged as a whole, in a task of `group`."""
        if self._primary is None or self._model is None or self._turn is None or self._turn[0] != turn:
            return
        _, speech = self._turn
        self._turn = None
        self._pending[turn] = anyio.Event()
        group.start_soon(self._judge, self._primary, self._model, turn, speech[: int(MAX_VOICE_S * SAMPLE_RATE_HZ)])

    def is_looked_at(self, turn: int) -> bool:
        """Whether a turn that goes on may still turn out to be another's voice by an early look."""
        if turn in self._looking.values():
            return True
        known = self._primary is not None and self._primary.knows_user
        return known and self._turn is not None and self._turn[0] == turn and self._num_looks < len(EARLY_LOOKS_S)

    def seems_other(self, turn: int) -> bool:
        """Whether an early look has taken a turn for another's voice."""
        return turn == self._other_turn

    async def verdict(self, turn: int) -> SpeakerVerdict:
        """Whose voice a turn was that has ended. Waits for the judgement, and forgets it."""
        if pending := self._pending.get(turn):
            await pending.wait()
            self._pending.pop(turn, None)
        return self._verdicts.pop(turn, UNDECIDED)

    def forget(self, turn: int) -> None:
        """Nobody will ask for the verdict on a turn."""
        self._pending.pop(turn, None)
        self._verdicts.pop(turn, None)

    def clear(self) -> None:
        """What was said of the open turn is dropped, and the next one has its number."""
        self._turn, self._num_looks, self._other_turn = None, 0, None
        self._looking.clear()

    async def _look(self, primary: PrimarySpeaker, model: SpeakerModel, look: object, speech: Pcm) -> None:
        try:
            vector = await model.embed(speech)
        except (ModelError, Refused) as error:
            log.info("a voice was not judged: %s", error)
            self._looking.pop(look, None)
            return
        # None: the audio was cleared meanwhile.
        turn = self._looking.pop(look, None)
        if turn is not None and primary.judge(vector, len(speech) / SAMPLE_RATE_HZ).is_other:
            self._other_turn = turn
            if self._on_other:
                await self._on_other(turn)

    async def _judge(self, primary: PrimarySpeaker, model: SpeakerModel, turn: int, speech: Pcm) -> None:
        try:
            learns = primary.mode == "auto" and not primary.knows_user
            takes = (await in_thread(enrolment_takes, speech))[1:] if learns else ()
            vector, *others = [await model.embed(take) for take in (speech, *takes)]
            self._verdicts[turn] = primary.heard(vector, len(speech) / SAMPLE_RATE_HZ, others)
            while len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.pop(next(iter(self._verdicts)))
        except (ModelError, Refused) as error:
            log.info("a voice was not judged: %s", error)
        finally:
            if pending := self._pending.get(turn):
                pending.set()
