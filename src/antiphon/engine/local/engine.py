"""The local engine: one model, the thread that steps it, and the sessions through which an event loop uses it.

Sessions post requests. Between two steps the model's thread applies them, plans a step, runs it, and returns the
results to the sessions' event loops. A call waits for a step only if it awaits the step's result.

This module implements the contract in `engine/api.py`. `steps.py` runs the steps, `scheduler.py` decides which rows go
into a step, and `runner.py` computes it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from tokenizers import Tokenizer

from antiphon.engine.api import (
    Capabilities,
    EngineSettings,
    EngineState,
    Finish,
    Grammar,
    Position,
    Sampling,
    Sink,
    Token,
    require,
)
from antiphon.engine.generation import Constraint, Generation
from antiphon.engine.grammar import GrammarCompiler
from antiphon.engine.local import CAPABILITIES
from antiphon.engine.local.kv.cache import PAGE_ROWS, KvCache
from antiphon.engine.local.reader import TokenReader, call_in
from antiphon.engine.local.scheduler import Scheduler
from antiphon.engine.local.step import ScheduledSession, StepLimits, StepRunner
from antiphon.engine.local.steps import IDLE_CHECK_S, ObserveEngineStep, Steps
from antiphon.engine.model_thread import ModelThread
from antiphon.errors import EngineError, ModelLost, Refused
from antiphon.shares.threads import GRAMMAR_THREADS, in_thread

# Seconds after which sessions that found no room are tried again, if nothing happens before.
RETRY_S = 0.05


class LocalEngine:
    """An Engine that steps one model in this process, in a thread of its own, from construction until `close`.

    `runner`: the model. Only the model's thread may use it. `tokenizer`: the model's tokenizer; without one the engine
    lacks GRAMMAR. `observe`: called after each step, in the model's thread. `clock`: monotonic seconds.
    `thread`: the model's thread, which also runs the model's other parts between two steps. `last_state`: the state
    after the last step. `scheduler`: must be called in the model's thread only (`thread.call`).
    """

    name = "local"

    def __init__(
        self,
        runner: StepRunner,
        settings: EngineSettings | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        observe: ObserveEngineStep | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or EngineSettings()
        self.runner = runner
        self._clock = clock
        s = self.settings
        cache = KvCache(runner.storage(s), budget_bytes=s.kv_bytes, host_bytes=s.host_bytes, disk_bytes=s.disk_bytes)
        context = min(s.context_rows or runner.context_rows, runner.context_rows)
        limits = StepLimits(context, s.decode_rows, s.prefill_rows, s.prefill_only_rows, s.park_after_s)
        self.scheduler = Scheduler(cache, limits)
        self._steps = Steps(self.scheduler, runner, ahead=s.step_ahead, observe=observe, clock=clock)
        self._grammars = GrammarCompiler(tokenizer, runner.vocabulary_size) if tokenizer is not None else None
        self.last_state = EngineState()
        stream = runner.stream() if s.step_ahead else None
        self.thread = ModelThread(
            "engine", step=self._work, pause_s=self._pause_s, on_close=self._fail_all, stream=stream
        )

    @property
    def capabilities(self) -> Capabilities:
        """All capabilities of this kind of engine; without a tokenizer, all except GRAMMAR."""
        return CAPABILITIES if self._grammars else CAPABILITIES & ~Capabilities.GRAMMAR

    @property
    def context_rows(self) -> int:
        """The maximum number of rows of a session in the KV, as limited by the model, the settings and the memory."""
        return self.scheduler.limits.context_rows

    @property
    def vocabulary_size(self) -> int:
        """The number of tokens of the model's head, which may exceed the tokenizer's."""
        return self.runner.vocabulary_size

    @property
    def width(self) -> int:
        """The length of an embedding row, including the features for the decoder's first layers."""
        return self.runner.width

    @property
    def eos_tokens(self) -> frozenset[int]:
        """The tokens that end a text by the model's configuration (`eos_token_id`)."""
        return self.runner.eos_tokens

    async def open(self, reserve_rows: int | None = None, *, owner: Hashable | None = None) -> LocalSession:
        """Return a session without rows, with room promised for `reserve_rows` (None: as the settings say).

        The session shares KV with sessions of an equal `owner` that begin with the same rows; None: with no other
        session. The caller closes it. Waits for the step under way. Raises Refused if there is no room, or after
        `close`.
        """
        rows = max(PAGE_ROWS, self.settings.reserve_rows if reserve_rows is None else reserve_rows)
        return LocalSession(self, await self._admit(lambda: self.scheduler.open(rows, self._clock(), owner)))

    async def fork(self, session: LocalSession) -> LocalSession:
        """Return a new session with the same rows. `LocalSession.fork` checks beforehand that forking is allowed."""
        source = session.scheduled
        twin = await self._admit(lambda: self.scheduler.fork(source, self._clock()))
        return LocalSession(self, twin, session.length)

    async def _admit(self, make: Callable[[], ScheduledSession]) -> ScheduledSession:
        """Return the session that `make` opens. A caller that is cancelled meanwhile leaves no session behind."""
        opened: list[ScheduledSession] = []

        def open_one() -> ScheduledSession:
            opened.append(make())
            return opened[0]

        def close_all() -> None:
            for session in opened:
                self.scheduler.close(session, keep=False)

        try:
            return await self.thread.call(open_one)
        except asyncio.CancelledError:
            with suppress(Refused, ModelLost):
                self.thread.post(close_all)
            raise

    async def state(self) -> EngineState:
        """Return the engine's state now, after the step under way. Raises Refused if the engine is closed."""
        return await self.thread.call(self._state)

    async def prepare_grammar(self, grammar: Grammar, stop: frozenset[int]) -> None:
        """Compile a grammar, in a helper thread, for generations with the stop tokens `stop`.

        Takes milliseconds, and about a second the first time. Raises CapabilityError if the engine has no tokenizer,
        GrammarError if the grammar is refused.
        """
        await self.constraint(grammar, stop)

    async def constraint(self, grammar: Grammar, stop: frozenset[int]) -> Constraint:
        """Return a constraint that enforces `grammar`: see `prepare_grammar`. Quick if it was prepared recently."""
        require(self, Capabilities.GRAMMAR)
        assert self._grammars
        kept = self._grammars.kept(grammar, stop)
        if kept is not None:
            return kept
        return await in_thread(self._grammars.compile, grammar, stop, places=GRAMMAR_THREADS)

    def close(self, timeout_s: float = 10.0) -> None:
        """End the model's thread after the step under way, and block until it has ended or `timeout_s` has passed.

        Generations and calls that wait for rows get an EngineError; later calls of sessions raise Refused.
        """
        self.thread.close(timeout_s)

    def _state(self) -> EngineState:
        scheduler, cache = self.scheduler, self.scheduler.cache
        return EngineState(
            sessions=len(scheduler.sessions),
            generating=scheduler.generating,
            parked=cache.num_asleep,
            kv_bytes=cache.held_pages * cache.page_bytes,
            kv_total_bytes=cache.total_pages * cache.page_bytes,
            promised_bytes=cache.claimed_pages * cache.page_bytes,
            parked_bytes=cache.parked_rows * cache.storage.row_bytes,
        )

    # Called in the model's thread.

    def _work(self) -> bool:
        stepped = self._steps.run()
        self.last_state = self._state()
        return stepped

    def _pause_s(self) -> float:
        return RETRY_S if self.scheduler.has_ready else IDLE_CHECK_S

    def _fail_all(self) -> None:
        self.scheduler.fail_all(EngineError("the engine was closed"))


class LocalSession:
    """A Session of a LocalEngine. Methods that return at once take effect in the model's thread before its next step.

    `scheduled`: the session as the model's thread sees it, to be read in that thread only (`ModelThread.call`).
    `finish`: why the last generation ended; None before the first, while one is under way, and after one that failed.
    """

    def __init__(self, engine: LocalEngine, scheduled: ScheduledSession, length: int = 0) -> None:
        self._engine, self._thread = engine, engine.thread
        self.scheduled = scheduled
        self._length = length
        self._generating = False
        self._closed = False
        self.finish: Finish | None = None

    @property
    def length(self) -> int:
        """The number of rows that were given, or sampled and read. Includes rows that left the context."""
        return self._length

    @property
    def cached(self) -> int:
        """The number of rows at the head whose KV came from another session; 0 until the first rows are computed."""
        return self.scheduled.cached

    @property
    def context_start(self) -> int:
        """The first row after the pinned ones that is still in the context, as of the last step.

        Equal to the number of pinned rows until a cut or an eviction. Rows given since the last step may move it.
        """
        return self.scheduled.rows.pinned + self.scheduled.rows.dropped

    def append(self, ids: Sequence[int], positions: Sequence[Position] | None = None) -> None:
        """Add tokens at the end. The prefill of all except the newest starts at once.

        `positions`: one for each token, counted from the first free position; None: each token follows the one before
        it. Raises ValueError if the numbers of tokens and positions differ, EngineError while the session generates or
        after it is closed.
        """
        self._require_idle()
        given = tuple(ids)
        _check_positions(len(given), positions)
        self._thread.post(lambda: self._engine.scheduler.append(self.scheduled, given, positions))
        self._length += len(given)

    def append_embeddings(
        self, rows: Any, positions: Sequence[Position] | None = None, sink: Sink | None = None
    ) -> None:
        """Add embeddings, float [n, width], at the end, as `append` adds tokens.

        `sink` receives the tapped layer's output for them, before any token that follows is delivered. If the decoder
        has no tapped layer, the session fails. Raises ValueError if the rows have another shape, and the errors of
        `append`.
        """
        self._require_idle()
        given = self._engine.runner.embeddings(rows)
        _check_positions(len(given), positions)
        scheduler = self._engine.scheduler
        self._thread.post(lambda: scheduler.append_embeddings(self.scheduled, given, positions, sink))
        self._length += len(given)

    def pin(self) -> None:
        """Keep all rows so far (the system prompt) in every later context cut. Raises EngineError as `append` does."""
        self._require_idle()
        self._thread.post(self.scheduled.rows.pin)

    def start_turn(self) -> None:
        """Mark the next row as the beginning of a turn. A context cut falls on such a row if one is near enough.

        Raises EngineError as `append` does.
        """
        self._require_idle()
        self._thread.post(self.scheduled.rows.start_turn)

    def rollback(self, position: int) -> None:
        """Take back all rows from `position` on. This is free: the KV of the rows before it stays.

        Raises EngineError if the row does not exist or has left the context, and as `append` does.
        """
        self._require_idle()
        rows = self.scheduled.rows
        if not 0 <= position <= self._length:
            raise EngineError(f"cannot roll back to row {position} of {self._length}")
        if rows.dropped and rows.pinned < position < rows.pinned + rows.dropped:
            raise EngineError(f"row {position} has left the context")
        self._thread.post(lambda: self._engine.scheduler.rollback(self.scheduled, position))
        self._length = position

    def evict(self, count: int) -> None:
        """Drop the `count` oldest rows after the pinned ones; `length` still counts them.

        The KV of the later rows stays. Unlike after a context cut, these rows still carry traces of the dropped ones,
        because their keys and values were computed with them. If the model's keys cannot be moved
        (`Runner.rotate_half`), the rows are computed again without the dropped ones. Raises EngineError as `append`
        does.
        """
        self._require_idle()
        self._thread.post(lambda: self._engine.scheduler.evict(self.scheduled, count))

    async def settle(self, *, include_newest: bool = False) -> None:
        """Wait until the rows given so far are in the KV.

        The newest row is left for the generation that needs its logits, unless `include_newest`. Raises ModelError if a
        step failed, ModelLost if the engine's thread is lost, EngineError if the session or the engine was closed
        meanwhile.
        """
        self._require_open()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def on_settled(error: Exception | None) -> None:
            self._thread.deliver(loop, lambda: _resolve(done, error))

        scheduler = self._engine.scheduler
        with self._thread.waiting(lambda error: call_in(loop, lambda: _resolve(done, error))):
            self._thread.post(lambda: scheduler.settle(self.scheduled, on_settled, include_newest=include_newest))
            await done

    async def generate(self, params: Sampling) -> AsyncGenerator[Token, None]:
        """Sample tokens after the last row and yield each as it is sampled. Each becomes a row of the session.

        Pending rows are computed first. `finish` says afterwards why the generation ended. Closing the generator, or
        cancelling its task, ends the generation within one step; the session keeps exactly the tokens that were
        yielded. The engine pauses when it is MAX_UNREAD_TOKENS ahead of the reader.

        Raises ModelError if a step failed, ModelLost if the engine's thread is lost. Raises EngineError if there are no
        rows, or if the session is generating already or closed. Raises CapabilityError and GrammarError as
        `LocalEngine.prepare_grammar` does.
        """
        async with self._reading(params, group=1) as reader:
            while reader.reason is None:
                for token in await reader.next():
                    self._keep(reader, 1)
                    yield token
            self.finish = reader.reason

    async def collect(
        self, params: Sampling, *, until: Callable[[Sequence[Token]], bool] | None = None, group: int = 16
    ) -> list[Token]:
        """Sample tokens after the last row, and return all of them when the generation ends.

        `until`: called in the event loop with the tokens so far, whenever `group` more have arrived. If it returns
        True, the generation ends with Finish.CANCELLED, and these tokens are returned. The engine pauses when it is
        MAX_UNREAD_TOKENS ahead of these calls. Without `until` it does not pause, and calls the event loop once. If
        this method raises or is cancelled, the session keeps none of the tokens. Raises the errors of `generate`.
        """
        tokens = list[Token]()
        async with self._reading(params, group=group if until else 0) as reader:
            while reader.reason is None:
                tokens += await reader.next()
                if until and reader.reason is None and until(tokens):
                    break
            self._keep(reader, len(tokens))
            self.finish = reader.reason
        return tokens

    @asynccontextmanager
    async def _reading(self, params: Sampling, group: int) -> AsyncIterator[TokenReader]:
        """Generate while the block runs. It sets `finish` if it has read to the end; otherwise, all tokens that it has
        not passed to `_keep` are taken back.
        """
        self._require_idle()
        reader = TokenReader(self._thread, params, self._length, group)
        generation = reader.generation
        self._generating, self.finish = True, None
        try:
            if params.grammar is not None:
                generation.constraint = await self._engine.constraint(params.grammar, params.stop)
                self._require_open()
            with self._thread.waiting(reader.lost):
                self._thread.post(lambda: self._begin(generation))
                try:
                    yield reader
                finally:
                    if self.finish is None:
                        self.finish = None if reader.failed else Finish.CANCELLED
                        self._cancel(generation, reader.kept)
        finally:
            self._generating = False

    async def fork(self) -> LocalSession:
        """Return another session with the same rows, which the caller closes.

        The two share their KV until one of them writes, which copies it. Raises Refused if there is no room for another
        session, EngineError while this one generates or after it is closed.
        """
        self._require_idle()
        return await self._engine.fork(self)

    def close(self, *, keep: bool = False) -> None:
        """Give back the session's KV. A no-op if the session or the engine is closed already.

        `keep`: leave the KV to later sessions that begin with the same tokens, while there is room for it.
        """
        if not self._closed:
            self._closed = True
            # A closed engine holds nothing. The memory of a lost one is not given back before the process ends.
            with suppress(Refused, ModelLost):
                self._thread.post(lambda: self._engine.scheduler.close(self.scheduled, keep))

    def _begin(self, generation: Generation) -> None:
        try:
            self._engine.scheduler.generate(self.scheduled, generation)
        except EngineError as error:
            generation.end(error)

    def _keep(self, reader: TokenReader, count: int) -> None:
        """Make the next tokens that were read rows of the session."""
        reader.kept += count
        self._length += count

    def _cancel(self, generation: Generation, kept: int) -> None:
        with suppress(Refused, ModelLost):
            self._thread.post(lambda: self._engine.scheduler.cancel(self.scheduled, generation, kept))

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError("the session is closed")

    def _require_idle(self) -> None:
        self._require_open()
        if self._generating:
            raise EngineError("the session is generating: end that first")


def _check_positions(count: int, positions: Sequence[Position] | None) -> None:
    if positions is not None and len(positions) != count:
        raise ValueError(f"{len(positions)} positions for {count} rows")


def _resolve(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.done():
        return
    if error:
        done.set_exception(error)
    else:
        done.set_result(None)
