"""Text language models of `transformers` (Llama, Qwen2, Qwen3, Gemma …) on the engine: conversations that keep their KV.

A conversation's tokens are rendered whole each time and compared with what its session holds: what differs is rolled back, what
is new is appended. So the template decides what a conversation is, and the KV of all that stayed the same is used again.
A model with senses (senses.py) has rows of sound and images where the template has a place for each.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer
from transformers import GenerationConfig

from antiphon.contracts import (
    LanguageLoad,
    LanguageProfile,
    MediaPart,
    Message,
    Reply,
    ReplyDone,
    ReplyOptions,
    TextDelta,
)
from antiphon.engine.api import Constraint, EngineSettings, Finish, Sampling
from antiphon.engine.local.engine import Engine, EngineSession
from antiphon.engine.local.runner import Runner
from antiphon.errors import EngineError, MediaError, ModelError, RemoteProtocolError
from antiphon.events.tools import Tool
from antiphon.modeling.chat_template import ChatTemplate
from antiphon.modeling.detokenizer import Detokenizer
from antiphon.modeling.media_rows import MediaEncoder, MediaRows
from antiphon.modeling.tool_grammar import (
    CLOSING,
    OPENING,
    CallGrammar,
    CallReader,
    Grammar,
    call_grammar,
    json_grammar,
)

log = logging.getLogger(__name__)

# Of a conversation: a token, or a row of what is heard or seen, by its number.
ChatRow = int | tuple[MediaPart, int]
# How many rows each sound or image has.
MediaSizes = dict[MediaPart, int]
# Bound: so many parts that are in it no more are held, for when they come back.
MAX_SPARE = 8


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """How the model's makers would sample it; from its generation_config.json."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float

    @classmethod
    def read(cls, folder: Path) -> SamplingDefaults:
        """Of a checkpoint's folder; greedy where it says nothing."""
        try:
            config = GenerationConfig.from_pretrained(folder)
        except OSError:
            config = GenerationConfig()  # type: ignore[no-untyped-call]
        return cls(
            temperature=_or(config.temperature, 1.0) if config.do_sample else 0.0,
            top_p=_or(config.top_p, 1.0),
            top_k=int(_or(config.top_k, 0)),
            min_p=_or(config.min_p, 0.0),
            repetition_penalty=_or(config.repetition_penalty, 1.0),
        )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


class ChatModel:
    """A decoder that holds conversations. `folder`: its checkpoint's; `senses`, where it hears or sees."""

    def __init__(
        self,
        folder: Path,
        model_id: str,
        runner: Runner,
        tokenizer: Any,
        settings: EngineSettings | None,
        observe: Callable[[int, int, float], None] | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.senses: MediaEncoder | None = None
        self.template = ChatTemplate(tokenizer)
        self.engine = Engine(runner, settings, observe=observe)
        self.defaults = SamplingDefaults.read(folder)
        context = self.engine.scheduler.limits.context_rows
        self.profile = LanguageProfile(model_id, context)
        ends = GenerationConfig.from_model_config(runner.config).eos_token_id
        also = ends if isinstance(ends, list) else [ends]
        self.stop_tokens = self.template.stop_tokens | {int(i) for i in also if i is not None}
        self.vocabulary = int(runner.config.vocab_size)
        self._guide: LLTokenizer | None = None

    async def open(self) -> ChatStream:
        """A new conversation. Raises Refused where there is no room for its KV."""
        return ChatStream(self, await self.engine.open())

    def load(self) -> LanguageLoad:
        """See LanguageModel."""
        seen = self.engine.seen
        return LanguageLoad(
            seen.sessions, seen.generating, seen.parked, seen.kv_bytes, seen.kv_total_bytes, seen.parked_bytes
        )

    def close(self) -> None:
        """Stop the engine."""
        self.engine.close()

    def encode(self, messages: Sequence[Message], tools: Sequence[Tool], *, answer: bool) -> list[int]:
        """The conversation's tokens. Raises RemoteProtocolError where the model's template does not take it."""
        try:
            return self.template.encode(messages, tools, answer=answer)
        except Exception as error:
            # A template is a program of the model's makers: whatever it raises is about these messages.
            raise RemoteProtocolError("invalid_value", f"The model's chat template: {error}", "messages") from error

    def constraint(self, options: ReplyOptions, begun: bool) -> Constraint | None:
        """What the options hold the answer to. Raises RemoteProtocolError for a schema the grammar does not take."""
        try:
            if options.schema is not None:
                return self._grammar(json_grammar(options.schema))
            tools = _offered(options)
            if not tools:
                return None
            closing = self.tokenizer.backend_tokenizer.token_to_id(CLOSING)
            grammar = call_grammar(tools, closing)
            return CallGrammar(lambda: self._grammar(grammar), self._piece, begun=begun)
        except ValueError as error:
            param = "response_format" if options.schema is not None else "tools"
            raise RemoteProtocolError("invalid_value", f"Invalid schema: {error}", param) from error

    def _grammar(self, grammar: str) -> Grammar:
        if self._guide is None:
            self._guide = LLTokenizer(
                self.tokenizer.backend_tokenizer.to_str(), n_vocab=self.vocabulary, eos_token=sorted(self.stop_tokens)
            )
        return Grammar(self._guide, self.vocabulary, grammar)

    def _piece(self, token: int) -> str:
        return str(self.tokenizer.backend_tokenizer.decode([token], skip_special_tokens=False))


class ChatStream:
    """One conversation; see Dialogue. `told`, where set, is told the tokens of each answer as they come."""

    def __init__(self, model: ChatModel, session: EngineSession) -> None:
        self._model = model
        self._session = session
        self.told: Callable[[int], None] | None = None
        self.rows: list[ChatRow] = []
        # Of the sound and the images that are in it, or were of late; and those that are being taken in.
        self.sensed: dict[MediaPart, MediaRows] = {}
        self._sensing: dict[MediaPart, asyncio.Future[MediaRows]] = {}
        # How many messages behind the system's a truncation took, and the first of them: it is of this conversation only.
        self._cut: tuple[int, Message | None] = (0, None)
        # Counts what was asked of it.
        self._asked = 0
        self._ids = (f"call_{secrets.token_hex(12)}" for _ in itertools.count())

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """See Dialogue. One that is overtaken by another, or by a reply, does nothing."""
        self._asked = mine = self._asked + 1
        system, rest = _system(messages)
        rest = rest[self._cut_of(rest) :]
        sizes = await self._sense((*system, *rest))
        if self._asked != mine:
            return
        ids, head = await asyncio.to_thread(self._rendered, (*system, *rest), tools, False, sizes)
        if self._asked == mine:
            self._align(ids, head)

    async def reply(self, messages: Sequence[Message], options: ReplyOptions) -> AsyncGenerator[Reply, None]:
        """See Dialogue. Raises RemoteProtocolError for messages or schemas that cannot be."""
        model, session = self._model, self._session
        tools = _offered(options)
        self._asked += 1
        mine = self._asked
        system, rest = _system(messages)
        # What was cut already is cut again, where the policy is to cut.
        begins = self._cut_of(rest) if isinstance(options.truncation, float) else 0
        sizes = await self._sense((*system, *rest[begins:]))
        ids, head, cut = await asyncio.to_thread(self._fitted, messages, tools, options, sizes)
        if mine == self._asked:
            self._cut = (cut, _system(messages)[1][0]) if cut else (0, None)
        begun = bool(tools) and options.tool_choice not in ("auto", "none")
        if begun:
            # An answer that must be a call begins like one.
            ids += model.template.encode_opening(OPENING)
        constraint = await asyncio.to_thread(model.constraint, options, begun)
        params = self._sampling(options, len(ids), constraint)
        kept = self._align(ids, head)
        stream = Detokenizer(model.tokenizer.backend_tokenizer, options.stop)
        reader: CallReader | _Prose = CallReader(self._ids, begun=begun) if tools else _Prose()
        count = 0
        try:
            async with aclosing(session.generate(params)) as tokens:
                async for token in tokens:
                    count += 1
                    self.rows.append(token.id)
                    if self.told:
                        self.told(token.id)
                    if token.id in model.stop_tokens:
                        continue
                    for part in reader.feed(stream.feed(token.id)):
                        yield part
                    if stream.stopped is not None:
                        break
        except (ModelError, EngineError):
            del self.rows[session.length :]
            raise
        for part in itertools.chain(reader.feed(stream.flush()), reader.flush()):
            yield part
        cut = session.finish is Finish.LENGTH
        reason = "length" if cut else "tool_calls" if reader.calls else "stop"
        yield ReplyDone(reason, len(ids), max(kept, session.cached), count)  # type: ignore[arg-type]

    def close(self, *, keep: bool = False) -> None:
        """See Dialogue."""
        self._session.close(keep=keep)

    def _sampling(self, options: ReplyOptions, prompt: int, constraint: Constraint | None) -> Sampling:
        model, defaults = self._model, self._model.defaults
        room = model.profile.context_tokens - prompt
        wanted = options.max_tokens or max(room, model.profile.context_tokens // 4)
        return Sampling(
            max_tokens=wanted,
            temperature=_or(options.temperature, defaults.temperature),
            top_k=int(_or(options.top_k, defaults.top_k)),
            top_p=_or(options.top_p, defaults.top_p),
            min_p=_or(options.min_p, defaults.min_p),
            repetition_penalty=_or(options.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            seed=options.seed,
            stop=model.stop_tokens,
            bias=options.bias,
            constraint=constraint,
        )

    def _cut_of(self, rest: Sequence[Message]) -> int:
        count, first = self._cut
        return count if count < len(rest) and rest[0] == first else 0

    def _fitted(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: ReplyOptions, sizes: MediaSizes
    ) -> tuple[list[ChatRow], int, int]:
        """`_rendered`, under the policy for a conversation that has outgrown the context, and how many messages that takes.

        Raises RemoteProtocolError where it may not be cut.
        """
        policy, limit = options.truncation, self._model.profile.context_tokens
        system, rest = _system(messages)
        cut = self._cut_of(rest) if isinstance(policy, float) else 0
        ids, head = self._rendered((*system, *rest[cut:]), tools, True, sizes)
        if policy == "auto" or len(ids) + (options.max_tokens or 0) <= limit:
            return ids, head, cut
        if policy == "disabled":
            raise RemoteProtocolError(
                "context_length_exceeded",
                f"The conversation has {len(ids)} tokens; the model takes {limit}.",
                "truncation",
            )
        while len(ids) > policy * limit and cut + 1 < len(rest):
            cut += 1
            while cut + 1 < len(rest) and rest[cut].role != "user":
                cut += 1
            ids, head = self._rendered((*system, *rest[cut:]), tools, True, sizes)
        return ids, head, cut

    async def _sense(self, messages: Sequence[Message]) -> MediaSizes:
        """Encode what is heard and seen in these for the first time; returns their numbers of rows. Raises RemoteProtocolError, ModelError."""
        senses, out = self._model.senses, MediaSizes()
        for part in _media(messages) if senses else ():
            assert senses
            if part not in self.sensed:
                # Who asks for it besides, and who is cancelled, leave it be.
                taken = self._sensing.get(part)
                if taken is None:
                    taken = self._sensing[part] = asyncio.ensure_future(senses.take(part))
                    # Where nobody waits for it any more, nobody is told that it failed.
                    taken.add_done_callback(lambda made: made.cancelled() or made.exception())
                try:
                    made = await asyncio.shield(taken)
                except MediaError as error:
                    raise RemoteProtocolError("invalid_image", str(error), "item.content") from error
                finally:
                    if taken.done():
                        self._sensing.pop(part, None)
                self.sensed.setdefault(part, made)
            out[part] = len(self.sensed[part].rows)
        return out

    def _rows_of(self, messages: Sequence[Message], ids: Sequence[int], sizes: MediaSizes) -> list[ChatRow]:
        """Tokens with the rows of what is heard and seen in the place of those that stand for it."""
        senses = self._model.senses
        if senses is None:
            return list(ids)
        parts, out = iter(_media(messages)), list[ChatRow]()
        for token in ids:
            part = next(parts, None) if token in senses.places else None
            out += [(part, i) for i in range(sizes[part])] if part else [token]
        return out

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Tool], answer: bool, sizes: MediaSizes
    ) -> tuple[list[ChatRow], int]:
        """The conversation's rows, and how many of them are the system turn, which no context cut takes."""
        ids = self._rows_of(messages, self._model.encode(messages, tools, answer=answer), sizes)
        if not messages or messages[0].role != "system" or not any(m.role == "user" for m in messages):
            return ids, 0
        probe = self._model.encode([messages[0], Message("user", "\u2026")], tools, answer=False)
        return ids, common(ids, probe)

    def _align(self, ids: list[ChatRow], head: int) -> int:
        """Make the session hold just `ids`; returns how many of them it held."""
        held = common(self.rows, ids)
        try:
            if held < len(self.rows):
                self._session.rollback(held)
        except EngineError:
            # Those rows left the context in a cut: begin anew.
            self._session.rollback(0)
            held = 0
        if held < head:
            self._append(ids[held:head])
            self._session.pin()
        self._session.start_turn()
        self._append(ids[max(held, head) :])
        self.rows = list(ids)
        if self.sensed:
            used = {row[0] for row in ids if not isinstance(row, int)}
            for part in [part for part in self.sensed if part not in used][:-MAX_SPARE]:
                del self.sensed[part]
        return held

    def _append(self, rows: Sequence[ChatRow]) -> None:
        """Rows of one part are here from the first to the last, or not at all."""
        senses = self._model.senses
        for part, ids in runs(rows):
            if part is None:
                self._session.append(ids)
            else:
                sensed = self.sensed[part]
                sink = sensed.sink if senses and senses.taps else None
                self._session.append_embeddings(sensed.rows, sensed.positions, sink)


def _system(messages: Sequence[Message]) -> tuple[Sequence[Message], Sequence[Message]]:
    """The system's message, which no truncation takes, and the rest."""
    count = int(bool(messages) and messages[0].role == "system")
    return messages[:count], messages[count:]


def _media(messages: Sequence[Message]) -> list[MediaPart]:
    return [p for m in messages for p in m.parts if not isinstance(p, str)]


def runs(rows: Sequence[ChatRow]) -> Iterator[tuple[MediaPart | None, list[int]]]:
    """Rows by what they are of, in order: a part, or None and their tokens."""
    for part, of_it in itertools.groupby(rows, lambda row: None if isinstance(row, int) else row[0]):
        yield part, [row for row in of_it if isinstance(row, int)]


def common(a: Sequence[ChatRow], b: Sequence[ChatRow]) -> int:
    """How many rows at the head are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class _Prose:
    """A reader of text that holds no calls."""

    calls = 0

    def feed(self, text: str) -> Iterator[Reply]:
        if text:
            yield TextDelta(text)

    def flush(self) -> Iterator[Reply]:
        return iter(())


def _offered(options: ReplyOptions) -> tuple[Tool, ...]:
    """The tools an answer may call: all, or the one that was chosen."""
    if options.tool_choice in ("auto", "required"):
        return options.tools
    return tuple(t for t in options.tools if t.name == options.tool_choice)
