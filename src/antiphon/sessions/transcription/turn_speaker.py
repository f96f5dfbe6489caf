"""Finds out who speaks each turn: the session's user or another person, and which of the voices heard so far."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

import anyio
import anyio.abc

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts.speaker import SpeakerModel
from antiphon.errors import ModelError, Refused
from antiphon.events.transcription import EnrolledVoice, TranscriptDone, TranscriptionConfig
from antiphon.shares.threads import in_thread
from antiphon.turns.segmenter import Segmenter
from antiphon.turns.voices.enrolment import enrolment_takes
from antiphon.turns.voices.live_speakers import LiveSpeakers
from antiphon.turns.voices.primary_speaker import (
    EARLY_LOOKS_S,
    PrimarySpeaker,
    TurnSpeaker,
)

log = logging.getLogger(__name__)

# Maximum seconds of a turn, from its beginning, that are judged: to tell the user from others, and only for a label.
MAX_VOICE_S, MAX_LABEL_S = 10.0, 4.0
# Maximum number of turns whose voices are kept until their transcripts are complete.
MAX_FOUND = 64
# The speaker and the label of a turn whose voice was not judged.
UNKNOWN = (TurnSpeaker.UNDECIDED, "")


class TurnSpeakers:
    """Judges the turns of one session by their voices, in tasks that run concurrently with the listening task.

    - `model`: the speaker encoder. If None, turns are not judged.
    - `on_other`: awaited with the number of an open turn if its voice turns out not to be the user's.
    - `is_on`: whether turns of other people are distinguished from the user's. Read-only.
    - `labels`: the voices that turns are labelled with; None if the encoder was not measured for this.

    For one event loop. If the encoder fails, the turn stays undecided, which counts as the user's voice.
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
        clustering = model.profile.clustering if model else None
        self.labels = LiveSpeakers(model.profile, clustering) if model and clustering else None
        self._gives_labels = False
        # Turns are judged in order, since each label depends on the voices before.
        self._in_order = anyio.Lock()
        # The open turn with its speech so far, and the number of times that its voice was judged early.
        self._turn: tuple[int, Pcm] | None = None
        self._num_looks = 0
        # The turn whose voice was judged early as another person's, and the turn of each early judgement in progress.
        self._other_turn: int | None = None
        self._looking: dict[object, int] = {}
        # The speaker and the label of each turn that was judged.
        self._found: dict[int, tuple[TurnSpeaker, str]] = {}
        self._pending: dict[int, anyio.Event] = {}

    @property
    def judges(self) -> bool:
        """Whether the voices of turns are judged, for either purpose."""
        return self._primary is not None or self._gives_labels

    def configure(self, config: TranscriptionConfig) -> None:
        """Judge by this configuration from now on. A change of the mode or of the enrolled voices forgets a voice that
        was learned for it. Voices with labels are never forgotten.
        """
        self._gives_labels = config.speaker_labels and self.labels is not None
        if self.labels:
            self.labels.know(config.known_voices)
        wanted = (config.primary_speaker, config.enrolled_voices)
        if self._model is None or wanted == self._config:
            return
        self._config, self._primary = wanted, None
        if config.primary_speaker != "off":
            self._primary = PrimarySpeaker(config.primary_speaker, self._model.profile, config.enrolled_voices)
        self.is_on = self._primary is not None

    def follow(self, group: anyio.abc.TaskGroup) -> None:
        """Collect the speech of the open turn after audio was added, and judge its voice early if enough has arrived.
        Early judgements run in tasks of `group`.
        """
        if self._model is None or not self.judges:
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
            if self._primary and self._primary.knows_user:
                look = object()
                self._looking[look] = span.turn
                group.start_soon(self._look, self._primary, self._model, look, speech)

    def end_turn(self, turn: int, group: anyio.abc.TaskGroup) -> None:
        """Judge the whole of a turn that has ended, in a task of `group`."""
        if self._model is None or not self.judges or self._turn is None or self._turn[0] != turn:
            return
        _, speech = self._turn
        self._turn = None
        self._pending[turn] = anyio.Event()
        most_s = MAX_VOICE_S if self._primary else MAX_LABEL_S
        group.start_soon(self._judge, self._model, turn, speech[: int(most_s * SAMPLE_RATE_HZ)])

    def is_looked_at(self, turn: int) -> bool:
        """Whether an early judgement in progress may still find that this turn is another person's voice."""
        if turn in self._looking.values():
            return True
        known = self._primary is not None and self._primary.knows_user
        return known and self._turn is not None and self._turn[0] == turn and self._num_looks < len(EARLY_LOOKS_S)

    def seems_other(self, turn: int) -> bool:
        """Whether an early judgement has taken this turn for another person's voice."""
        return turn == self._other_turn

    async def named(self, done: TranscriptDone) -> TranscriptDone:
        """Return the transcript of a turn with its speaker and label. Waits for the judgement of the turn's voice."""
        if pending := self._pending.get(done.turn):
            await pending.wait()
            self._pending.pop(done.turn, None)
        speaker, label = self._found.pop(done.turn, UNKNOWN)
        is_known = speaker is not TurnSpeaker.UNDECIDED
        return replace(done, speaker=speaker.value if is_known else "", speaker_label=label)

    def forget(self, turn: int) -> None:
        """Drop what was found about a turn whose transcript has failed."""
        self._pending.pop(turn, None)
        self._found.pop(turn, None)

    def clear(self) -> None:
        """Drop the speech of the open turn. The next turn will have the same number."""
        self._turn, self._num_looks, self._other_turn = None, 0, None
        self._looking.clear()

    async def _look(self, primary: PrimarySpeaker, model: SpeakerModel, look: object, speech: Pcm) -> None:
        try:
            vector = await model.embed(speech)
        except (ModelError, Refused) as error:
            log.info("a voice was not judged: %s", error)
            self._looking.pop(look, None)
            return
        # None if the client has cleared the audio meanwhile.
        turn = self._looking.pop(look, None)
        if turn is not None and primary.judge(vector, len(speech) / SAMPLE_RATE_HZ).is_other:
            self._other_turn = turn
            if self._on_other:
                await self._on_other(turn)

    async def _judge(self, model: SpeakerModel, turn: int, speech: Pcm) -> None:
        primary, seconds = self._primary, len(speech) / SAMPLE_RATE_HZ
        try:
            learns = primary is not None and primary.mode == "auto" and not primary.knows_user
            takes = (await in_thread(enrolment_takes, speech))[1:] if learns else ()
            async with self._in_order:
                vector, *others = [await model.embed(take) for take in (speech, *takes)]
                speaker = primary.heard(vector, seconds, others).speaker if primary else TurnSpeaker.UNDECIDED
                label = self.labels.label(vector, seconds) if self.labels and self._gives_labels else ""
            self._found[turn] = speaker, label
            while len(self._found) > MAX_FOUND:
                self._found.pop(next(iter(self._found)))
        except (ModelError, Refused) as error:
            log.info("a voice was not judged: %s", error)
        finally:
            if pending := self._pending.get(turn):
                pending.set()
