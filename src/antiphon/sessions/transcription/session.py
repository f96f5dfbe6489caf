"""A transcription session, which takes commands and emits events. It owns its tasks, and knows no sockets, wire formats
or model names.

It has two tasks in one task group. *Listening*, in this module, reads the inbox, runs the VAD and owns the segmenter,
which cuts the audio into turns and windows. It waits for the transcriber only if too much audio is not decoded yet.
*Decoding* (decoding.py) gets the windows as values and turns them into text. It never touches the segmenter, but sends
commands to the listening task.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

import anyio
import anyio.abc

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import Transcriber, TurnDetector, VoiceActivityDetector
from antiphon.contracts.speaker import SpeakerModel
from antiphon.events.conversation import ConversationCommand
from antiphon.events.transcription import (
    AppendAudio,
    ClearAudio,
    CommitAudio,
    CommitRefused,
    ConfigureTranscription,
    SilenceCommitted,
    SpeechStarted,
    TranscriptDone,
    TranscriptFailed,
    TranscriptionConfig,
    TranscriptionEvent,
    TurnCleared,
    TurnCommitted,
)
from antiphon.sessions.inbox import Inbox
from antiphon.sessions.transcription.continuing import Continuing, Step
from antiphon.sessions.transcription.decoding import (
    Cut,
    Decoding,
    EmitTranscription,
    HeardBefore,
    Measure,
    Settle,
    WindowCommand,
)
from antiphon.sessions.transcription.microphone import MUTED_S, STALLED_S, Arrivals, EchoFilter, OverlapAudio
from antiphon.sessions.transcription.pause_judge import PauseJudge
from antiphon.sessions.transcription.state import ContinuedTranscription
from antiphon.sessions.transcription.turn_speaker import TurnSpeakers
from antiphon.turns.echo import EchoGuard
from antiphon.turns.floor_claim import FloorClaim
from antiphon.turns.segmenter import Segmenter
from antiphon.turns.windows import TurnEnded, WindowEnded

# Interval in seconds at which the session checks whether audio has stalled.
STALL_POLL_S = 0.12
# After HEARD_PAUSE samples of silence have arrived, missing audio counts as more of the same pause.
HEARD_PAUSE = SAMPLE_RATE_HZ // 5
# Samples (200 ms) of the pieces in which audio is processed if pauses or voices are judged.
JUDGED_PIECE = SAMPLE_RATE_HZ // 5
# Speech onset is detected up to ONSET_MS late.
ONSET_MS = 500

HandleOther = Callable[[ConversationCommand], Awaitable[None]]


class TranscriptionSession:
    """One client's transcription. Run `run()` as a task. Put commands into `inbox`. Closing it lets the session finish.

    - `emit`: awaited for every event. The session waits until it returns.
    - `min_commit_ms`: a commit with less new audio than this is refused with CommitRefused.
    - `measure`: gets a kind and seconds: "vad" and "partial" with the time that each run took, and "final" with the
      time from the end of a turn to its transcript.
    - `handle_other`: gets the commands that are not about audio, at their place in the order of all commands.
    - `turn_detector`: the turn detector for `semantic_vad`. Without it, the words and the silence decide.
    - `guards_echo`: whether to ignore responses that the microphone picks up. `expect_echo` then has to get the audio
      that is sent.
    - `tap`: awaited with all audio before it is analysed.
    - `on_heard`: awaited when audio was analysed and a turn is open.
    - `on_commit`: awaited after each accepted commit of the client, with the number of the turn that the commit ended.
    - `speaker_model`: tells voices apart, for `primary_speaker` and `speaker_labels`.
    - `on_other_voice`: awaited with the number of an open turn if its voice turns out not to be the user's.
    - `clock`: returns monotonic seconds.
    - `keeps_state`: whether another session may continue this one, from the state that `continuing` takes.
    - `continued`: the state from which this session continues another one.

    `audio_s` counts the seconds of audio processed. Everything runs in one event loop.
    """

    def __init__(
        self,
        config: TranscriptionConfig,
        transcriber: Transcriber,
        detector: VoiceActivityDetector,
        inbox: Inbox,
        emit: EmitTranscription,
        *,
        min_commit_ms: int = 0,
        measure: Measure = lambda *_: None,
        handle_other: HandleOther | None = None,
        turn_detector: TurnDetector | None = None,
        guards_echo: bool = False,
        tap: Callable[[Pcm], Awaitable[None]] | None = None,
        on_heard: Callable[[], Awaitable[None]] | None = None,
        on_commit: Callable[[int], Awaitable[None]] | None = None,
        speaker_model: SpeakerModel | None = None,
        on_other_voice: Callable[[int], Awaitable[None]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        keeps_state: bool = False,
        continued: ContinuedTranscription | None = None,
    ) -> None:
        self.config = config
        self.inbox = inbox
        self.audio_s = 0.0
        self._vad = detector.open()
        self._emit = emit
        self._min_commit_ms = min_commit_ms
        self._measure = measure
        self._handle_other = handle_other
        self._tap, self._on_heard, self._on_commit = tap, on_heard, on_commit
        self._guards_echo = guards_echo
        self._echo = EchoFilter(EchoGuard() if guards_echo else None, detector.frame_samples)
        self._claim = FloorClaim(detector.frame_samples)
        self._arrivals = Arrivals()
        # The sample from which the idle timeout counts, unless the user has spoken after it.
        self._idle_from = 0
        # Start in milliseconds of each turn that has no transcript yet.
        self._unread_from_ms: dict[int, int] = {}
        self._leaves_open_turn = False
        self._group: anyio.abc.TaskGroup | None = None
        self._clock = clock
        self._decoding = Decoding(config, transcriber, self._emit_decoded, self._apply_command, measure, clock)
        self._keeps_state = keeps_state
        # Events that are about to be emitted, and windows and turns that are about to be passed to decoding.
        self._steps: deque[Step] = deque()
        start = continued.from_sample if continued else 0
        self._segmenter = Segmenter(self._decoding.profile, config.vad, detector.frame_samples, start=start)
        self.speakers = TurnSpeakers(speaker_model, self._segmenter, on_other_voice)
        self.continuing = Continuing(
            *(transcriber.profile.id, self._segmenter, self._decoding, self.speakers.labels, self._steps),
            *(continued, detector, keeps_state),
        )
        self._pauses = PauseJudge(turn_detector, self._segmenter)
        self._pauses.configure(config.vad)

    @property
    def now(self) -> int:
        """The current sample of the client's microphone, counted from the session's start. It includes the time in
        which a muted client sends nothing, and the commands that wait in the inbox: audio counts by its length, any
        other command as 10 ms or more.
        """
        return self._echo.now(self._clock(), self._num_received())

    def expect_echo(self, pcm: Pcm) -> None:
        """Expect the echo of audio that is about to be sent: float32 [num_samples], 16 kHz. It plays after the audio
        sent before.
        """
        self._echo.expect(pcm, self._clock(), self._num_received())

    def expect_silence(self) -> None:
        """Expect no more echo, because audio that was not played by now never will be."""
        self._echo.expect_silence(self._clock(), self._num_received())

    @property
    def settled_ms(self) -> float:
        """The millisecond of the session's audio before which all speech has its transcript. It lags behind the
        microphone by up to ONSET_MS, because the onset of speech may be detected late.
        """
        return max(0.0, min((self._open_from_ms, *self._unread_from_ms.values())))

    @property
    def _open_from_ms(self) -> float:
        """The earliest millisecond at which the open turn may have begun, or at which the next turn may begin."""
        now_ms = self._segmenter.now * 1000 / SAMPLE_RATE_HZ
        from_ms = now_ms - self._segmenter.uncommitted_ms
        if not self.config.vad:
            return from_ms
        if self._segmenter.window is None and self._arrivals.is_muted(self._clock()):
            return now_ms
        prefix_ms = self._segmenter.prefix_samples * 1000 / SAMPLE_RATE_HZ
        return max(from_ms, now_ms - prefix_ms - ONSET_MS)

    @property
    def progress(self) -> TranscriptionSession:
        """The session's progress: `audio_s` and `is_silent`. A conversation's `progress` has more properties."""
        return self

    @property
    def num_held(self) -> int:
        """Size of the session's state: the samples of audio, plus the turns and windows to decode. Bounded for sessions
        of any length.
        """
        return self._segmenter.num_held + self._decoding.num_held

    @property
    def speaking(self) -> bool:
        """Whether the user is speaking: a turn is open and not in a pause. The value is late by the audio that waits in
        the inbox and by the VAD's detection delay.
        """
        return self._segmenter.window is not None and self._segmenter.quiet_since is None

    @property
    def claims_floor(self) -> bool:
        """Whether the user's speech sounds as if it claims the floor, see `FloorClaim`."""
        return self._claim.claims

    @property
    def is_silent(self) -> bool:
        """True if all received audio was processed, the user does not speak, and all speech has its transcript. If the
        client ends the turns, speech that it has not committed yet counts as speech without a transcript.
        """
        return self.inbox.is_worked_off and self.is_quiet

    @property
    def is_quiet(self) -> bool:
        """As `is_silent`, but by the audio that was processed so far. More may wait in the inbox."""
        is_read = not self._unread_from_ms and self._decoding.idle and not self.continuing.is_behind
        return self._segmenter.window is None and is_read

    @property
    def spoken_ms(self) -> int:
        """Milliseconds from the start of the open window to its newest speech, without the current pause. 0 if no
        window is open. During an overlap, this is its length.
        """
        window, quiet = self._segmenter.window, self._segmenter.quiet_since
        end = self._segmenter.now if quiet is None else quiet
        return (end - window.start) * 1000 // SAMPLE_RATE_HZ if window else 0

    def overlap_audio(self, since: int | None, frame_samples: int) -> OverlapAudio | None:
        """Return the whole frames of the open window from sample `since` on, see `EchoFilter.overlap`.

        None if no window is open or no frame is new.
        """
        if (window := self._segmenter.window) is None:
            return None
        return self._echo.overlap(window, since, frame_samples, self._clock(), self._num_received())

    async def run(self) -> None:
        """Run both tasks until the inbox is closed and all audio in it is transcribed. An open turn is then committed,
        unless `leave_open_turn` was called. Does not raise if a decode fails. Errors of `emit`, `handle_other` and the
        VAD end the session.
        """
        async with anyio.create_task_group() as group:
            self._group = group
            self.speakers.configure(self.config)
            group.start_soon(self._decoding.run)
            await self._listen()
            if self._leaves_open_turn:
                await self._leave()
            elif self._segmenter.window or not self._decoding.idle:
                # The inbox was closed inside a turn, whose audio so far still gets a transcript.
                await self._apply_steps(self._segmenter.commit())
            self._decoding.end()

    def leave_open_turn(self) -> None:
        """Leave the open turn uncommitted when the inbox is closed. The client sends the turn's audio again, to the
        host that continues the session.
        """
        self._leaves_open_turn = True

    def settle_turn(self, turn: int) -> None:
        """Count a turn as settled after its transcript or failure was emitted. A consumer that stores events may call
        this earlier, as soon as the turn is stored.
        """
        self._unread_from_ms.pop(turn, None)

    def turn_goes_on(self, pause_ms: float) -> None:
        """Record that the open turn continues the last one, after a pause of `pause_ms` that was no end of turn. The
        speaker's pauses count as longer from now on, and the open turn ends after a longer pause.
        """
        self._segmenter.turn_goes_on(round(pause_ms))

    # --- listening -----------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        while True:
            awaits_silence = self._segmenter.settling or self._segmenter.in_turn or self.continuing.is_behind
            with anyio.move_on_after(STALL_POLL_S if awaits_silence else math.inf) as waiting:
                item = await self.inbox.get()
            if waiting.cancelled_caught:
                await self._stall()
                continue
            if self.continuing.is_behind and not isinstance(item, AppendAudio) and not self._leaves_open_turn:
                await self._restore()
            match item:
                case None:
                    return
                case AppendAudio(pcm):
                    pcm = await self._hear_again(pcm) if self.continuing.is_behind else pcm
                    is_cut = len(pcm) > 2 * JUDGED_PIECE and (self._pauses.is_on or self.speakers.judges)
                    step = JUDGED_PIECE if is_cut else SAMPLE_RATE_HZ
                    for start in range(0, len(pcm), step):
                        await self._listen_to(pcm[start : start + step])
                        more = len(pcm) - start > step or self.inbox.backlog_s > 0
                        await self._pauses.pace(min(step, len(pcm) - start), more=more)
                    self._arrivals.came(self._clock(), len(pcm))
                case CommitAudio(final=True, event_id=event_id):
                    await self._commit(event_id)
                case CommitAudio(final=False):
                    pass
                case ClearAudio():
                    await self._clear()
                case ConfigureTranscription(config):
                    await self.configure(config)
                case other:
                    assert self._handle_other
                    assert not isinstance(other, CommitAudio)
                    await self._handle_other(other)

    async def _stall(self) -> None:
        """Count STALL_POLL_S without audio. After a limit, missing audio counts as silence, which ends turns and their
        windows. In the middle of speech the limit is MUTED_S. While no client is connected, only windows end.
        """
        # The clock would be wrong here: a stalled server has not read the audio that arrived meanwhile.
        arrivals, segmenter = self._arrivals, self._segmenter
        arrivals.stalled_s += STALL_POLL_S
        if self.continuing.is_behind:
            if self.inbox.is_fed() and arrivals.stalled_s >= self.continuing.patience_s:
                await self._restore()
            return
        if segmenter.settling:
            if arrivals.stalled_s >= STALLED_S:
                await self._apply_steps(segmenter.settle())
            return
        if not self.inbox.is_fed():
            arrivals.stalled_s = 0.0
            return
        # A very short pause before the gap may itself be caused by the network.
        quiet = segmenter.quiet_since
        is_pause = quiet is not None and segmenter.now - quiet >= HEARD_PAUSE
        if arrivals.stalled_s >= (arrivals.stall_limit_s if is_pause else MUTED_S):
            waited = int(arrivals.stalled_s * SAMPLE_RATE_HZ)
            await self._apply_steps(segmenter.wait(waited))
            assert self._group
            self._pauses.follow(self._group, waited)

    async def _listen_to(self, pcm: Pcm) -> None:
        while self._decoding.behind:
            await self._decoding.changed()
        if self._tap:
            await self._tap(pcm)
        started, heard_since = self._clock(), None
        self._arrivals.heard(started)
        probabilities = await self._vad.feed(pcm)
        if probabilities:
            self._measure("vad", self._clock() - started)
        self.audio_s += len(pcm) / SAMPLE_RATE_HZ
        if self._guards_echo and self.config.vad:
            probabilities, heard_since = self._without_echo(pcm, probabilities)
        if self._on_heard:
            self._claim.feed(pcm, probabilities)
        await self._apply_steps(self._segmenter.feed(pcm, probabilities, heard_since))
        await self._decoding.retract_guess()
        assert self._group
        self._pauses.follow(self._group)
        self.speakers.follow(self._group)
        if self._on_heard and self._segmenter.in_turn:
            await self._on_heard()
        await self._report_silence()

    async def _report_silence(self) -> None:
        """Report that the user has not spoken for the idle timeout, and commit the silence as a turn without words."""
        timeout_ms = self.config.idle_timeout_ms
        if timeout_ms is None or (silent_since := self._segmenter.silent_since) is None:
            return
        now, since = self._segmenter.now, max(silent_since, self._idle_from)
        if now - since >= timeout_ms * SAMPLE_RATE_HZ / 1000:
            self._idle_from = now
            per_ms = SAMPLE_RATE_HZ // 1000
            silence = SilenceCommitted(self._segmenter.turn, since // per_ms, now // per_ms)
            await self._apply_steps([silence, *self._segmenter.commit_silence()])

    def _num_received(self) -> int:
        """Samples that the client has sent, including those in the inbox."""
        return self._segmenter.now + int(self.inbox.backlog_s * SAMPLE_RATE_HZ)

    def _without_echo(self, pcm: Pcm, probabilities: list[float]) -> tuple[list[float], int | None]:
        """Return the probabilities with 0 for frames that are an echo, and the first sample of earlier speech that was
        taken for an echo, else None.
        """
        now, num_received = self._segmenter.now, self._num_received() + len(pcm)
        is_live = self._arrivals.is_live(self._clock(), now)
        return self._echo.judge(pcm, probabilities, now, self._clock(), num_received, is_live=is_live)

    async def _commit(self, event_id: str | None) -> None:
        have_ms = self._segmenter.uncommitted_ms
        if have_ms < self._min_commit_ms:
            await self._emit(CommitRefused(have_ms, self._min_commit_ms, event_id))
            return
        turn = self._segmenter.turn
        await self._apply_steps(self._segmenter.commit())
        if self._on_commit:
            await self._on_commit(turn)

    async def _clear(self) -> None:
        self.settle_turn(self._segmenter.turn)
        self._decoding.clear(self._segmenter.turn)
        self.speakers.clear()
        await self._apply_steps([*self._segmenter.clear(), TurnCleared()])
        self._vad.reset()
        self._echo.clear()
        self._claim.clear()

    async def _leave(self) -> None:
        if self._keeps_state:
            return
        turn = self._segmenter.turn
        self._unread_from_ms.setdefault(turn, math.floor(self._open_from_ms))
        self._decoding.clear(turn)
        self.speakers.clear()
        await self._apply_steps(self._segmenter.clear())

    async def configure(self, config: TranscriptionConfig) -> None:
        """Apply a changed configuration at once, and emit the end of a turn that the change ends. Call it only from
        `handle_other`, which runs in the listening task. Other callers put a ConfigureTranscription into the inbox.
        """
        if config.idle_timeout_ms != self.config.idle_timeout_ms:
            self._idle_from = self._segmenter.now
        self.config = config
        self._decoding.configure(config)
        self._pauses.configure(config.vad)
        self.speakers.configure(config)
        await self._apply_steps(self._segmenter.apply(self._decoding.profile, config.vad))

    # --- handing over to decoding -------------------------------------------------------------------------------------

    async def _apply_steps(self, steps: Iterable[Step]) -> None:
        """Emit events, and pass ended windows and turns to decoding, in order. The open window is passed last, so that
        decoding cannot report a turn's transcript before the turn's end was emitted.
        """
        self._steps.extend(steps)
        while self._steps:
            step = self._steps.popleft()
            match step:
                case WindowEnded() | TurnEnded():
                    self._decoding.add(step)
                case SpeechStarted(turn, at_ms):
                    self._unread_from_ms.setdefault(turn, at_ms)
                    await self._emit(step)
                case TurnCommitted(turn, start_ms):
                    self._unread_from_ms.setdefault(turn, start_ms)
                    if self._group:
                        self.speakers.end_turn(turn, self._group)
                    await self._emit(step)
                case event:
                    await self._emit_decoded(event)
        self.inbox.kept_bytes = self._segmenter.num_bytes
        self._decoding.update_window(self._segmenter.window, settling=self._segmenter.settling)

    async def _emit_decoded(self, event: TranscriptionEvent) -> None:
        """Emit an event of decoding, after adding the turn's speaker to a transcript."""
        if isinstance(event, TranscriptFailed):
            self.speakers.forget(event.turn)
        elif isinstance(event, TranscriptDone):
            event = await self.speakers.named(event)
        await self._emit(event)
        if isinstance(event, TranscriptDone | TranscriptFailed):
            self.settle_turn(event.turn)

    # --- continuing another session -----------------------------------------------------------------------------------

    async def _hear_again(self, pcm: Pcm) -> Pcm:
        """Record audio that another session has divided into turns. Returns the audio after that."""
        rest = await self.continuing.hear_again(pcm, self._vad)
        self.audio_s += (len(pcm) - len(rest)) / SAMPLE_RATE_HZ
        self._arrivals.came(self._clock(), len(pcm))
        if not self.continuing.num_missing:
            await self._restore()
        return rest

    async def _restore(self) -> None:
        """Continue from the state of another session, of which all audio was heard again."""
        steps, unread_from_ms = self.continuing.restore()
        self._unread_from_ms |= unread_from_ms
        await self._apply_steps(steps)

    def _apply_command(self, command: WindowCommand) -> bool:
        """Carry out a command of decoding. Returns False if its window or pause is over."""
        match command:
            case Cut(window_id, sample):
                window = self._segmenter.window
                if window is None or window.id != window_id:
                    return False
                self._segmenter.cut(sample)
                # The end of its turns may not be emitted yet. `_apply_steps` sets `settling` after that.
                self._decoding.update_window(self._segmenter.window, settling=False)
            case Settle(pause):
                if self._segmenter.quiet_since != pause or not self._segmenter.settling:
                    return False
                for step in self._segmenter.settle():
                    self._decoding.add(step)
            case HeardBefore(pause, text, language):
                return self._pauses.heard(pause, text, language)
        return True
