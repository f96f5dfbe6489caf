"""Conversations that keep their KV between turns, for language models of `transformers` on an engine.

Each request renders the whole conversation as tokens and compares them with the session's rows. The rows from the first
difference on are rolled back, and the new rows are appended. So the template alone determines the format of a
conversation, and the KV of unchanged rows is used again. For a model with a media encoder, rows of audio and images
replace the template's placeholders.

This module depends on templates and on the contract of engines (`engine/api.py`). The adapters choose the checkpoints
and the engines.
"""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from antiphon.contracts import (
    LanguageLoad,
    LanguageProfile,
    Message,
    Reply,
    ReplyDone,
    ReplyOptions,
    TextDelta,
    ToolCallStarted,
)
from antiphon.engine.api import Engine, Finish, Grammar, Sampling, Session, Sink
from antiphon.engine.schemas import json_grammar
from antiphon.errors import EngineError, GrammarError, ModelError, Refused, RemoteProtocolError
from antiphon.events.tools import Tool
from antiphon.modeling.chat_template import ChatTemplate, newest_turn, told_plainly
from antiphon.modeling.media_rows import (
    ChatRow,
    ConversationMedia,
    MediaBudget,
    MediaEncoder,
    MediaPiece,
    MediaRows,
    MediaSizes,
    common_prefix,
    grows,
    media_of,
    runs,
)
from antiphon.modeling.omni.hidden_rows import HiddenRows
from antiphon.modeling.prompts import PromptRenderer
from antiphon.modeling.tensors import SamplingDefaults
from antiphon.modeling.tokens import Detokenizer
from antiphon.modeling.tool_grammar import (
    CALL_CLOSING,
    CALL_OPENING,
    CallReader,
    ProseReader,
    call_grammar,
    offered_tools,
    prose_grammar,
)
from antiphon.shares.threads import in_thread
from antiphon.text.written_calls import has_what_was_said

log = logging.getLogger(__name__)

# Limit of encoded parts that are kept after they have left the conversation, in case they return.
MAX_SPARE_PARTS = 8
# The encoded parts of all conversations together take at most one byte for each KV_PER_MEDIA bytes of the KV's budget.
KV_PER_MEDIA = 4


class ChatModel:
    """A decoder that holds conversations: an engine, a tokenizer and a chat template. A LanguageModel.

    `folder`: the checkpoint's folder, for its generation configuration. `engine`: steps the decoder. The model owns it,
    and `close` ends it. `tokenizer`: a tokenizer of `transformers` with a chat template. `media_encoder`: set by an
    adapter whose model hears or sees. `stop_tokens`: the tokens that end a reply. `profile`: the model's profile, in
    which the context is the engine's limit. `writes_tags`: the model has begun a call with the opening tag of its own
    accord, as models do that were trained on calls.
    """

    def __init__(self, folder: Path, model_id: str, engine: Engine, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.media_encoder: MediaEncoder | None = None
        self.media_budget = MediaBudget()
        self.writes_tags = False
        self.template = ChatTemplate(tokenizer)
        self.engine = engine
        self.defaults = SamplingDefaults.read(folder)
        self.profile = LanguageProfile(model_id, engine.context_rows, keeps_to_schemas=True)
        self.stop_tokens = self.template.stop_tokens | engine.eos_tokens

    async def open(self, owner: Hashable | None = None) -> ChatStream:
        """Return a new conversation, which the caller closes. Raises Refused if there is no room for its KV."""
        return ChatStream(self, await self.engine.open(owner=owner), owner)

    def load(self) -> LanguageLoad:
        """Return the engine's use of its memory after its last step. Does not wait."""
        state = self.engine.last_state
        kv = (state.kv_bytes, state.kv_total_bytes, state.parked_bytes, state.promised_bytes)
        return LanguageLoad(state.sessions, state.generating, state.parked, *kv)

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engine that steps the model, for the watchdog of its thread."""
        return (self.engine,)

    def close(self) -> None:
        """End the engine after its current step, and block until it has ended. See Engine.close."""
        self.engine.close()

    def encode(self, messages: Sequence[Message], tools: Sequence[Tool], *, answer: bool) -> list[int]:
        """Return the conversation's tokens. `answer`: also include the tokens that open the reply.

        Raises RemoteProtocolError if the model's template does not accept the messages.
        """
        try:
            return self.template.encode(messages, tools, answer=answer)
        except Exception as error:
            # A template is a program that the checkpoint contains. Any exception that it raises is about these
            # messages.
            raise RemoteProtocolError("invalid_value", f"The model's chat template: {error}", "messages") from error

    async def grammar(self, options: ReplyOptions, *, begun: bool) -> Grammar | None:
        """Return the grammar that the options' schema or tools impose on a reply; None if they do not constrain it.

        `begun`: the prompt ends in a call's opening tag. Waits for the engine to prepare the grammar. Raises
        RemoteProtocolError if the engine does not accept the schema, and CapabilityError.
        """
        if options.schema is not None:
            rule = json_grammar(options.schema)
        elif tools := offered_tools(options):
            rule = call_grammar(tools, self.tokenizer.backend_tokenizer.token_to_id(CALL_CLOSING), begun=begun)
        else:
            return None
        try:
            return await self.prepared(rule)
        except GrammarError as error:
            raise _invalid_schema(options, error) from error

    async def prepared(self, rule: Grammar) -> Grammar:
        """Wait until the engine has prepared a grammar, and return it. Raises GrammarError and CapabilityError."""
        await self.engine.prepare_grammar(rule, self.stop_tokens)
        return rule


@dataclass(slots=True)
class _Attempt:
    """One request to the model, for a reply or for the rest of a reply."""

    # The options of the reply.
    options: ReplyOptions
    # The rows before the reply.
    ids: list[ChatRow]
    # The number of rows at the start that are never cut from the context.
    head: int
    # The tools that may be called.
    tools: Sequence[Tool]
    # The grammar that the generated text must match, if any.
    rule: Grammar | None
    # Splits the generated text into prose and calls.
    reader: CallReader | ProseReader
    # The prose of earlier attempts.
    prose: str = ""
    # The rows before the call, if this attempt generates a call again.
    before: list[ChatRow] = field(default_factory=list)
    # Result: the number of rows that the session already held.
    held: int = 0
    # Result: the number of tokens that were generated.
    count: int = 0
    # Result: True if a stop string was found.
    is_stopped: bool = False

    @property
    def is_full(self) -> bool:
        """Whether the attempt has generated its maximum number of tokens."""
        return self.options.max_tokens == self.count


class ChatStream:
    """One conversation on an engine session, with its KV. A LanguageStream, used from one event loop.

    `rows`: the session's rows, prompt and reply. `on_token`: a callback for each token of a reply; None: no callback.
    `hidden`: if set before the first request, keeps the output of the decoder's tapped layer for each row.
    """

    def __init__(self, model: ChatModel, session: Session, owner: Hashable | None) -> None:
        self._model = model
        self._session = session
        self._owner = owner
        self.on_token: Callable[[int], None] | None = None
        self.hidden: HiddenRows | None = None
        self.rows: list[ChatRow] = []
        self._media = ConversationMedia(model.media_budget)
        self._prompts = PromptRenderer(model.encode, model.media_encoder, model.profile.context_tokens)
        # The number of the newest request. A prefill does nothing more after another request has begun.
        self._request = 0
        self._call_ids = (f"call_{secrets.token_hex(12)}" for _ in itertools.count())

    @property
    def session(self) -> Session:
        """The engine's session, which holds the rows' KV."""
        return self._session

    @property
    def media_rows(self) -> Mapping[MediaPiece, MediaRows]:
        """The encoded audio clips and images that are in the conversation, or were in it recently."""
        return self._media.rows

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Compute the conversation's rows before the reply is requested.

        If the audio is still growing, computes rows up to the end of its finished windows. Waits for encoders and the
        template, not for the rows. Stops early if another prefill or a reply begins. Raises RemoteProtocolError if the
        messages cannot be rendered, and ModelError if an encoder fails.
        """
        self._request = request = self._request + 1
        kept = self._prompts.kept(messages)
        sizes = await self._encode_media(kept)
        if self._request != request:
            return
        ids, head = await in_thread(partial(self._prompts.rendered, answer=False), kept, tools, sizes)
        if self._request != request:
            return
        growing = {piece for part, pieces in sizes.items() if grows(part) for piece, _ in pieces}
        if growing:
            ids = ids[: 1 + max(i for i, row in enumerate(ids) if not isinstance(row, int) and row[0] in growing)]
        if growing or not any(grows(part) for part in sizes):
            self._align(ids, head)

    async def reply(self, messages: Sequence[Message], options: ReplyOptions) -> AsyncGenerator[Reply, None]:
        """Yield the reply to a conversation: prose and calls while they are generated, then one ReplyDone.

        Closing the generator ends the reply within one step. The session keeps the sampled tokens, in case the
        conversation continues with them. Raises RemoteProtocolError if the messages or schemas are invalid, if the
        conversation does not fit and may not be truncated, or if a bias names an unknown token. Raises ModelError or
        EngineError if the engine fails.
        """
        attempt = await self._first_attempt(messages, options)
        if call := await self._call_alone(messages, attempt):
            for part in call:
                yield part
            return
        num_prompt, count, cached = len(attempt.ids), 0, None
        while True:
            async with aclosing(self._generate(attempt)) as parts:
                async for part in parts:
                    yield part
            count += attempt.count
            cached = max(attempt.held, self._session.cached) if cached is None else cached
            following = await self._next_attempt(attempt, messages)
            if following is None:
                break
            attempt = following
        reader = attempt.reader
        is_cut = self._session.finish is Finish.LENGTH or (reader.written is not None and attempt.is_full)
        reason = "length" if is_cut else "tool_calls" if reader.calls else "stop"
        yield ReplyDone(reason, num_prompt, cached, count)  # type: ignore[arg-type]

    async def _generate(self, attempt: _Attempt) -> AsyncGenerator[Reply, None]:
        """Yield the parts that one attempt generates, and set its results."""
        model, session, reader, options = self._model, self._session, attempt.reader, attempt.options
        params = self._sampling(options, len(attempt.ids), attempt.rule)
        attempt.held = self._align(attempt.ids, attempt.head)
        detokenizer = Detokenizer(model.tokenizer.backend_tokenizer, options.stop)
        try:
            async with aclosing(session.generate(params)) as tokens:
                async for token in tokens:
                    if self.hidden and attempt.count:
                        self.hidden.add(token.hidden)
                    attempt.count += 1
                    self.rows.append(token.id)
                    if self.on_token:
                        self.on_token(token.id)
                    if token.id in model.stop_tokens:
                        continue
                    for part in reader.feed(detokenizer.feed(token.id)):
                        if isinstance(part, ToolCallStarted) and attempt.rule and attempt.rule.trigger:
                            model.writes_tags = True
                        yield part
                    is_called = reader.called and not options.parallel_tool_calls
                    if detokenizer.stopped is not None or is_called or reader.written is not None:
                        break
        except GrammarError as error:
            raise _invalid_schema(options, error) from error
        except (ModelError, EngineError):
            del self.rows[session.length :]
            raise
        for part in itertools.chain(reader.feed(detokenizer.flush()), reader.flush()):
            yield part
        attempt.is_stopped = detokenizer.stopped is not None

    async def _first_attempt(self, messages: Sequence[Message], options: ReplyOptions) -> _Attempt:
        tools = offered_tools(options)
        begun = bool(tools) and options.tool_choice not in ("auto", "none")
        ids, head = await self._prompt(messages, tools, options)
        if begun:
            ids += self._model.template.encode_opening(CALL_OPENING)
        rule = await self._model.grammar(options, begun=begun)
        reader = self._reader(() if options.schema is not None else tools, (), begun=begun)
        return _Attempt(options, ids, head, tools, rule, reader)

    async def _call_alone(self, messages: Sequence[Message], attempt: _Attempt) -> list[Reply]:
        """Return the call, with its ReplyDone, that the model makes if the newest turn is the whole conversation.

        Small models that have answered in words go on in words. Empty if the model answers this turn in words too, and
        for models that were trained on calls, which judge the whole conversation better. Another session of the engine
        makes the call. Sessions of one owner share the KV of the tools.
        """
        newest, parts = newest_turn(messages), list[Reply]()
        is_chosen = attempt.options.tool_choice != "auto" or isinstance(attempt.reader, ProseReader)
        is_followed = self.on_token or self.hidden or any(m.parts for m in newest)
        if not newest or is_chosen or is_followed or self._model.writes_tags:
            return []
        try:
            stream = await self._model.open(self._owner)
        except Refused:
            return []
        try:
            async with aclosing(stream.reply(newest, attempt.options)) as replies:
                async for part in replies:
                    if self._model.writes_tags or (isinstance(part, TextDelta) and part.text.strip()):
                        return []
                    parts.append(part)
        finally:
            stream.close()
        return parts if any(isinstance(part, ToolCallStarted) for part in parts) else []

    async def _next_attempt(self, made: _Attempt, messages: Sequence[Message]) -> _Attempt | None:
        """Return the next attempt after a call in an unexpected format; None if the reply is complete."""
        reader, limit = made.reader, made.options.max_tokens
        answers_call = messages[-1].role == "tool"
        if reader.written is None or made.is_full or made.is_stopped or (answers_call and reader.prose.strip()):
            return None
        options = replace(made.options, max_tokens=limit and limit - made.count)
        if answers_call:
            return await self._attempt_from_results(messages, options)
        ids = made.ids + (await in_thread(self._model.template.encode_text, reader.prose) if reader.prose else [])
        prose = made.prose + reader.prose
        if not reader.written:
            return await self._attempt_in_words(replace(made, options=options, ids=made.before or ids, prose=prose))
        options = replace(options, tool_choice=reader.written)
        return await self._attempt_to_call(replace(made, options=options, ids=ids, prose=prose), messages)

    async def _attempt_from_results(self, messages: Sequence[Message], options: ReplyOptions) -> _Attempt:
        """Return an attempt for a model that repeats a call: it gets the result in words, and must reply in prose."""
        ids, head = await self._prompt(told_plainly(messages), (), options)
        return _Attempt(options, ids, head, (), await self._model.prepared(prose_grammar()), ProseReader())

    async def _attempt_in_words(self, made: _Attempt) -> _Attempt:
        """Return an attempt in prose: the tool does not exist, or the call contains nothing that the user said."""
        rule = await self._model.prepared(prose_grammar(begun=bool(made.prose)))
        return _Attempt(made.options, made.ids, made.head, (), rule, ProseReader(), made.prose)

    async def _attempt_to_call(self, made: _Attempt, messages: Sequence[Message]) -> _Attempt:
        """Return an attempt that must generate the call again, constrained to the tool's schema."""
        ids = [*made.ids, *self._model.template.encode_opening(CALL_OPENING)]
        rule = await self._model.grammar(made.options, begun=True)
        reader = self._reader(made.tools, messages, begun=True)
        return _Attempt(made.options, ids, made.head, made.tools, rule, reader, made.prose, before=made.ids)

    def _reader(self, tools: Sequence[Tool], doubted_in: Sequence[Message], *, begun: bool) -> CallReader | ProseReader:
        """The reader that separates prose and calls.

        Calls in other formats are not recognized if the reply must be a call (`begun`), or if its tokens are observed
        (`on_token`, `hidden`). `doubted_in`: the conversation; a call must contain something that was said in it.
        Empty: no such requirement.
        """
        if not tools:
            return ProseReader()
        is_followed = begun or self.on_token or self.hidden
        names = () if is_followed else [tool.name for tool in tools]
        # Audio and images cannot be compared with words.
        is_judged = doubted_in and not any(m.parts for m in doubted_in)
        is_meant = partial(has_what_was_said, tools, [(m.role, m.text) for m in doubted_in]) if is_judged else None
        return CallReader(self._call_ids, begun=begun, names=names, is_meant=is_meant)

    def close(self, *, keep: bool = False) -> None:
        """Free the conversation's KV. `keep`: keep it for later conversations that begin with the same rows."""
        self._session.close(keep=keep)
        self._media.close()

    async def _prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: ReplyOptions
    ) -> tuple[list[ChatRow], int]:
        """Return the rows before a reply, and the number of them that are never cut. Stops every prefill."""
        self._request = request = self._request + 1
        # Messages that were dropped before are dropped again, unless truncation is disabled.
        kept = messages if options.truncation == "disabled" else self._prompts.kept(messages)
        sizes = await self._encode_media(kept)
        ids, head, dropped = await in_thread(self._prompts.fitting, messages, tools, options, sizes)
        if request == self._request:
            self._prompts.drop(messages, dropped)
        return ids, head

    def _sampling(self, options: ReplyOptions, prompt: int, grammar: Grammar | None) -> Sampling:
        model, sampled = self._model, self._model.defaults.unless(options)
        if any(not 0 <= token < model.engine.vocabulary_size for token in options.bias):
            size = model.engine.vocabulary_size
            raise RemoteProtocolError("invalid_value", f"The model has {size} tokens, from 0 on.", "logit_bias")
        room = model.profile.context_tokens - prompt
        wanted = options.max_tokens or max(room, model.profile.context_tokens // 4)
        return Sampling(
            max_tokens=wanted,
            temperature=sampled.temperature,
            top_k=sampled.top_k,
            top_p=sampled.top_p,
            min_p=sampled.min_p,
            repetition_penalty=sampled.repetition_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            seed=options.seed,
            stop=model.stop_tokens,
            bias=options.bias,
            grammar=grammar,
            hidden=self.hidden is not None,
        )

    async def _encode_media(self, messages: Sequence[Message]) -> MediaSizes:
        """Encode the messages' audio and images. Raises the errors of ConversationMedia.encode."""
        model = self._model
        if model.media_encoder is None:
            return {}
        limit_bytes = model.engine.last_state.kv_total_bytes // KV_PER_MEDIA
        return await self._media.encode(
            model.media_encoder, media_of(messages), limit_bytes, lambda: self._used(self.rows)
        )

    def _align(self, ids: list[ChatRow], head: int) -> int:
        """Make the session hold exactly `ids`. Returns the number of these rows that it held before."""
        held = common_prefix(self.rows, ids)
        if self.hidden:
            held = min(held, self.hidden.known)
        try:
            if held < len(self.rows):
                self._session.rollback(held)
        except EngineError:
            # These rows were cut from the context, so all rows are appended again.
            self._session.rollback(0)
            held = 0
        if self.hidden:
            self.hidden.truncate(held)
        if held < head:
            self._append(ids[:head], held)
            self._session.pin()
        self._session.start_turn()
        self._append(ids, max(held, head))
        self.rows = list(ids)
        self._media.keep(self._used(ids), MAX_SPARE_PARTS)
        return held

    def _used(self, rows: Sequence[ChatRow]) -> set[MediaPiece]:
        """Return the media pieces to which these rows belong."""
        return {row[0] for row in rows if not isinstance(row, int)} if self.media_rows else set()

    def _append(self, rows: Sequence[ChatRow], begin: int) -> None:
        """Append the rows from index `begin` on to the session, which already holds the earlier ones."""
        encoder, hidden = self._model.media_encoder, self.hidden
        for run in runs(rows, begin, self.media_rows, encoder.joined if encoder else ()):
            if run.part is None and hidden:
                self._session.append_embeddings(hidden.embedded(run.ids), run.positions, hidden.expect(len(run.ids)))
            elif run.part is None:
                self._session.append(run.ids, run.positions)
            else:
                media = self.media_rows[run.part]
                sink: Sink | None = media.sink(run.start) if encoder and encoder.has_tap else None
                if hidden:
                    sink = hidden.expect(run.stop - run.start)
                self._session.append_embeddings(media.rows[run.start : run.stop], run.positions, sink)


def _invalid_schema(options: ReplyOptions, error: GrammarError) -> RemoteProtocolError:
    param = "response_format" if options.schema is not None else "tools"
    return RemoteProtocolError("invalid_value", f"Invalid schema: {error}", param)
