"""Splits text for Qwen3-TTS: long texts into parts, and text that is still being written into whole words.

Pure: handles only strings, and gets the tokenizer as a function.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from textwrap import wrap

from antiphon.text.sentences import SentenceSplitter

# A longer text is spoken in parts, because the model generates at most 2048 frames for a text.
MAX_PART_CHARS = 600
# A word without a possible cut is split at this length.
MAX_WORD_CHARS = 200
# Punctuation of Chinese and Japanese, after which words follow without a space.
WIDE_MARKS = "，。！？；：、"


def long_text_parts(text: str) -> Iterator[str]:
    """Yield a text in parts of at most MAX_PART_CHARS, split between sentences, or between words in longer sentences.

    A short text is yielded unchanged. In longer ones, white space between sentences becomes one space.
    """
    if len(text) <= MAX_PART_CHARS:
        yield text
        return
    splitter = SentenceSplitter("sentence")
    held = ""
    sentences = (*splitter.feed(text), *splitter.flush())
    for piece in (part for sentence in sentences for part in wrap(sentence, MAX_PART_CHARS)):
        if held and len(held) + len(piece) > MAX_PART_CHARS:
            yield held
            held = ""
        held = f"{held} {piece}".strip()
    if held:
        yield held


async def tokens_of_words(
    texts: AsyncIterator[str], encode: Callable[[str], list[int]]
) -> AsyncGenerator[list[int], None]:
    """Yield the tokens of a text that arrives in pieces, as soon as its words are complete, and the rest at its end.

    Together they are the tokens of the whole text, because it is split only where no token can span the split. Waits
    for `texts`. A text of white space yields nothing. A word of more than MAX_WORD_CHARS is split anywhere.
    """
    held, seen = "", 1
    async for text in texts:
        held += text
        cut = max((i for i in range(seen, len(held)) if _can_cut(held, i)), default=0)
        if not cut and len(held) > MAX_WORD_CHARS:
            cut = len(held)
        if cut:
            yield encode(held[:cut])
            held = held[cut:]
        # Whether a split before the last character is possible depends on the next character.
        seen = max(1, len(held) - 1)
    if held.strip():
        yield encode(held)


def _can_cut(text: str, at: int) -> bool:
    """Return whether no token can span this place.

    Such places are before a single space and a word, or after a wide mark.
    """
    if text[at] == " ":
        return not text[at - 1].isspace() and not text[at + 1 : at + 2].isspace() and bool(text[at + 1 : at + 2])
    return text[at - 1] in WIDE_MARKS and text[at].isalnum()
