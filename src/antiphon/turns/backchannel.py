"""Decides whether what somebody says while another speaks asks for the floor or only says "I am listening". Pure.

The words are the most common acknowledgements in conversation (Ward & Tsukahara 2000; the backchannel act of the AMI
corpus), in those languages that have them written alike or nearly so.
"""

from __future__ import annotations

from antiphon.events.words import bare_word

# A text of more characters is none, and is not looked at: a client may send any.
MAX_WORDS, MAX_CHARS = 4, 200
_ACKNOWLEDGEMENTS = (
    "mm mmm mhm mhmm hm hmm uh um huh ah aha ha oh ooh yeah yea yep yup yes ok okay kay right sure really wow nice "
    "cool great good true exactly absolutely indeed alright see i of course got it go on interesting "
    # German, French, Spanish, Italian, Portuguese
    "ja genau stimmt klar ach so oui ouais d'accord bien sûr sí si vale claro sì certo va bene sim pois é"
)
WORDS = frozenset(_ACKNOWLEDGEMENTS.split())
# Words of acknowledgements that, alone, begin a sentence; the phrases they belong to.
FRAGMENTS = frozenset(("i", "see", "of", "it", "go", "on", "got", "so", "va", "é", "d'accord", "bien"))
PHRASES = frozenset(
    (
        ("i", "see"),
        ("of", "course"),
        ("got", "it"),
        ("go", "on"),
        ("ach", "so"),
        ("va", "bene"),
        ("d'accord",),
        ("bien", "sûr"),
    )
)


def is_backchannel(text: str) -> bool:
    """Whether the text is at most MAX_WORDS words of acknowledgement and nothing else, or empty.

    Case, punctuation and hyphens do not matter. "no", "stop" and "wait" are not among the words, because they do ask
    for the floor, nor are words that only begin an acknowledgement ("I", "got") unless the rest of it follows.
    """
    if len(text) > MAX_CHARS:
        return False
    # "Mm-hmm" is two words, and typographic apostrophes are as good as plain ones; quotation marks are not apostrophes.
    plain = text.replace("-", " ").replace("\u2019", "'")
    words = tuple(w for w in (bare_word(w).strip("'") for w in plain.split()) if w)
    if len(words) > MAX_WORDS or any(w not in WORDS for w in words):
        return False
    return all(w not in FRAGMENTS for w in words) or words in PHRASES
