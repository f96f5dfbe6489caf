"""Finds cues, in the words of a turn so far, that more words follow. Pure.

A speaker who stops at "and", at "um" or in the middle of a telephone number will continue, whatever the voice sounds
like. The word "stop" is complete. The weights of these cues are not set here, but fitted (`end_of_turn.py`).

The classes of words are those of grammars. Conjunctions, determiners, prepositions and auxiliaries begin a phrase, so
more words have to follow (Quirk et al. 1985, A Comprehensive Grammar of the English Language, chapter 2). Fillers
announce a delay (Clark & Fox Tree 2002, Using uh and um in spontaneous speaking).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from antiphon.events.words import bare_word

# Number of characters at the end of a text that are examined. It is bounded because a client may send any text.
MAX_CHARS = 400
Mark = Literal["stop", "question", "open", "none"]

# Words after which a phrase has to follow, by ISO 639-1 language: conjunctions, determiners, possessives, and
# prepositions that do not end a sentence.
_DANGLING = {
    "en": "and or but because although though unless whereas while if whether since than as the a an my your his its "
    "our their every each of from into onto to between among during per with without via toward towards plus "
    "i'm you're we're they're i'd we'd you'd they'd it's i'll we'll you'll they'll which whose who's and/or "
    "very really quite maybe also",
    "de": "und oder aber weil obwohl wenn ob dass denn sondern als wie der die das den dem des ein eine einen einem "
    "einer eines mein meine meinen meinem meiner dein deine sein seine ihr ihre unser unsere kein keine von zu zum zur "
    "in im ins auf bei beim mit nach aus für durch gegen ohne um über unter vor zwischen am ans sehr",
    "fr": "et ou mais parce que car si quand lorsque puisque le la les l un une des du de d au aux mon ma mes ton ta "
    "tes son sa ses notre nos votre vos leur leurs ce cet cette ces à dans en par pour sur sous avec sans chez vers "
    "entre très qui dont je j tu il elle on nous vous qu",
    "es": "y e o u pero porque aunque si cuando que como el la los las un una unos unas del de al a mi mis tu tus su "
    "sus nuestro nuestra en con sin por para sobre entre desde hasta hacia muy este esta ese esa cada",
    "it": "e ed o ma perché se quando che come il lo la i gli le l un uno una del dello della dei degli delle di da "
    "dal dalla al allo alla ai a in nel nella con su sul sulla per tra fra mio mia tuo tua suo sua molto ogni",
    "pt": "e ou mas porque embora se quando que como o a os as um uma uns umas do da dos das de ao à em no na nos nas "
    "com sem por para pelo pela sobre entre desde até meu minha seu sua nosso nossa muito cada",
}
# Verbs that other words mostly follow: auxiliary and modal verbs, and verbs that take an infinitive.
_AUXILIARY = {
    "en": "is are was were am be been being will would can could shall should may might must do does did have has had "
    "having want need gonna wanna",
    "de": "ist sind war waren bin wird werden würde kann können könnte möchte muss will soll sollte habe hat haben "
    "hatte hätte",
    "fr": "est sont était suis sera peut peux veux veut dois doit ai a ont avons avez aimerais voudrais",
    "es": "es son era soy está estoy puede puedo quiero quisiera debe he ha han hay",
    "it": "è sono era ho ha hanno può posso voglio vorrei devo deve",
    "pt": "é são era sou está estou pode posso quero queria deve tem tenho",
}
_FILLERS = {
    "en": "um uh uhm umm uhh er erm eh hmm hm mm",
    "de": "äh ähm öh öhm hm hmm eh tja",
    "fr": "euh heu hum bah ben",
    "es": "eh em pues hum",
    "it": "eh ehm uhm mah beh cioè",
    "pt": "eh hum hã ahn tipo",
}
_FILLER_PHRASES = {
    "en": ("let me think", "let me see", "i mean", "you know", "sort of", "kind of", "what's called", "how do you say"),
    "de": ("wie heißt das", "ich meine", "weißt du", "sozusagen", "mal sehen", "lass mich überlegen"),
    "fr": ("je veux dire", "tu sais", "vous savez", "comment dire", "voyons voir", "en fait"),
    "es": ("o sea", "es decir", "a ver", "ya sabes", "cómo se dice"),
    "it": ("voglio dire", "come si dice", "vediamo un po'", "sai com'è"),
    "pt": ("quer dizer", "deixa eu ver", "sabe como é", "como se diz"),
}
# Answers and commands that are complete by themselves, in the languages above.
_COMPLETE_LIST = (
    "yes yeah yep yup no nope ok okay sure right stop wait cancel quit exit pause continue next back help hello hi hey "
    "bye goodbye thanks thank you please exactly correct absolutely never mind again repeat go on "
    "ja nein doch halt stopp genau danke bitte hallo tschüss weiter oui non merci bonjour arrête stop d'accord sí no "
    "vale gracias hola para alto sì grazie ciao basta sim não obrigado obrigada olá pare"
)
MAX_COMPLETE_WORDS = 3
_NUMBER_LIST = (
    "zero oh one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred double triple "
    "null eins zwo zwei drei vier fünf sechs sieben acht neun zehn elf zwölf zwanzig dreißig "
    "zéro deux trois quatre cinq sept huit neuf dix vingt trente cero uno dos tres cuatro cinco seis siete ocho nueve "
    "diez veinte due tre quattro cinque sei sette otto nove dieci venti um dois três quatro sete oito dez vinte"
)
# Fewer than MIN_GROUPS groups of digits are not a dictation ("at seven"). A telephone number has WHOLE_DIGITS digits
# without an area code, and at least LONG_DIGITS with one. A card or account number has at least CARD_DIGITS.
MIN_GROUPS, WHOLE_DIGITS, LONG_DIGITS, CARD_DIGITS = 2, 7, 10, 15
_CARD_WORDS_LIST = "card account iban karte konto carte compte tarjeta cuenta carta conto cartão conta"
# Signs in dictated numbers, addresses and names. Something follows each of them. "at" is only such a sign in an
# address ("jane at"), which a word of _ADDRESS_WORDS announces.
_SPOKEN_SIGNS_LIST = "dot underscore hyphen slash backslash hashtag punkt unterstrich arroba chiocciola"
_ADDRESS_WORDS_LIST = "email e-mail mail address website"
# "so" ends a sentence after these words ("I think so"). After any other word, a clause follows it.
_BEFORE_SO_LIST = (
    "think thought hope guess suppose say said says believe afraid do does did if not even or why how like just is"
)
# A list that ends without LIST_ENDS before its last item goes on: MIN_LISTED or more items of at most MAX_ITEM_WORDS.
_LIST_END_LIST = "and or und oder et ou y o e plus then etc that's"
MIN_LISTED, MAX_ITEM_WORDS = 3, 3

_DANGLING_SETS = {k: frozenset(v.split()) for k, v in _DANGLING.items()}
_AUXILIARY_SETS = {k: frozenset(v.split()) for k, v in _AUXILIARY.items()}
_COMPLETE = frozenset(_COMPLETE_LIST.split())
_NUMBER_WORDS = frozenset(_NUMBER_LIST.split())
_CARD_WORDS = frozenset(_CARD_WORDS_LIST.split())
_SPOKEN_SIGNS = frozenset(_SPOKEN_SIGNS_LIST.split())
_ADDRESS_WORDS = frozenset(_ADDRESS_WORDS_LIST.split())
_BEFORE_SO = frozenset(_BEFORE_SO_LIST.split())
_LIST_ENDS = frozenset(_LIST_END_LIST.split())
_FILLER_SETS = {k: frozenset(v.split()) for k, v in _FILLERS.items()}


@dataclass(frozen=True, slots=True)
class WordCues:
    """The cues at the end of a transcript."""

    # The mark at its end: "stop" (full stop or exclamation mark), "question", "open" (comma, dash, colon, semicolon or
    # ellipsis), or "none".
    mark: Mark = "none"
    # Whether another word has to follow the last one ("the", "because").
    dangling: bool = False
    # Whether the last word is a verb that other words mostly follow ("is", "want").
    auxiliary: bool = False
    # Whether it ends in a filler or in a phrase that announces a delay ("um", "let me think").
    filler: bool = False
    # Whether it ends in several groups of digits, number words or single letters, but too few for a telephone number.
    dictating: bool = False
    # Whether it ends in a list whose last item is not announced ("eggs, milk, bread").
    listing: bool = False
    # Whether it ends in digits, number words or single letters, and whether these may be a whole number.
    number: Literal["none", "part", "whole"] = "none"
    # Whether the whole text is an answer or a command of at most MAX_COMPLETE_WORDS words ("yes", "stop").
    complete: bool = False


def word_cues(text: str, language: str | None = None) -> WordCues:
    """Return the cues at the end of the transcript of a turn so far. Accepts any text.

    `text` is as a transcriber writes it. Only its last MAX_CHARS characters count. `language` is ISO 639-1, and None
    means English. Word lists exist for en, de, fr, es, it and pt. In other languages, only marks, digits, and complete
    answers count.
    """
    tail = text[-MAX_CHARS:].replace("\u2019", "'").rstrip(" \t\n\"'\u201d\u00bb\u300d)")
    words = [w for w in (bare_word(w).strip("'") for w in tail.split()) if w]
    language = (language or "en").partition("-")[0].lower()
    last = words[-1] if words else ""
    phrase = f" {' '.join(words)}"
    # An article may be joined to its noun: "l'", "d'".
    last_part = bare_word(tail.rsplit("'", 1)[0].split()[-1]) if tail.endswith("'") and tail.strip("'") else last
    filler = last in _FILLER_SETS.get(language, ()) or phrase.endswith(
        tuple(f" {p}" for p in _FILLER_PHRASES.get(language, ()))
    )
    # "one" alone is mostly a pronoun.
    found = (0, 0) if last == "one" and _groups(tail)[0] == 1 else _groups(tail)
    return WordCues(
        mark=_mark(tail),
        dangling=last_part in _DANGLING_SETS.get(language, ()) or (language == "en" and _so_follows(words)),
        auxiliary=last in _AUXILIARY_SETS.get(language, ()) and not filler,
        filler=filler,
        dictating=_dictating(words, *found),
        listing=language in _DANGLING and _listing(tail),
        number="none" if not found[0] else "whole" if _is_whole(words, found[1]) else "part",
        complete=0 < len(words) <= MAX_COMPLETE_WORDS and all(w in _COMPLETE for w in words),
    )


def _mark(tail: str) -> Mark:
    if tail.endswith(("...", "\u2026", ",", ";", ":", "-", "\u2013", "\u2014", "\u3001", "\uff0c")):
        return "open"
    if tail.endswith(("?", "\uff1f")):
        return "question"
    return "stop" if tail.endswith((".", "!", "\u3002", "\uff01")) else "none"


def _so_follows(words: list[str]) -> bool:
    """Return whether the last word is a "so" that a clause follows."""
    return len(words) > 1 and words[-1] == "so" and words[-2] not in _BEFORE_SO


def _listing(tail: str) -> bool:
    """Return whether the text ends in short items between commas, the last of which is not announced as the last."""
    sentence = re.split(r"[.!?:;\u2026]", tail.rstrip(".!, "))[-1]
    items = [[bare_word(w) for w in item.split()] for item in sentence.split(",")]
    if len(items) < MIN_LISTED or not all(items):
        return False
    # The words before the first item are not part of it: "I need eggs".
    short = all(len(item) <= MAX_ITEM_WORDS for item in items[1:])
    return short and not any(word in _LIST_ENDS for item in items[-2:] for word in item)


def _groups(tail: str) -> tuple[int, int]:
    """Return how many groups of digits, number words and single letters end the text, and how many digits they have."""
    groups = digits = 0
    for written in ("-", "\u2013", ",", "."):
        tail = tail.replace(written, " ")
    for token in reversed(tail.split()):
        word = bare_word(token)
        if word.isdecimal():
            digits += len(word)
        elif word in _NUMBER_WORDS:
            digits += 1
        elif not (len(word) == 1 and word.isalpha() and token.isupper()):
            break
        groups += 1
    return groups, digits


def _is_whole(words: list[str], digits: int) -> bool:
    """Return whether this number of digits may be a whole telephone, card or account number."""
    if _CARD_WORDS.isdisjoint(words):
        return digits == WHOLE_DIGITS or digits >= LONG_DIGITS
    return digits >= CARD_DIGITS


def _dictating(words: list[str], groups: int, digits: int) -> bool:
    """Return whether the text ends in groups of digits, number words or spelled letters that may continue, or in a
    sign of an address.
    """
    if len(words) > 1 and (words[-1] in _SPOKEN_SIGNS or (words[-1] == "at" and not _ADDRESS_WORDS.isdisjoint(words))):
        return True
    return groups >= MIN_GROUPS and not _is_whole(words, digits)
