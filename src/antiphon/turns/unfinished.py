"""Finds cues, in the words of a turn so far, that more words follow. Pure.

A speaker who stops at "and", at "um" or in the middle of a telephone number will continue, whatever the voice sounds
like. The word "stop" is complete. The weights of these cues are not set here, but fitted (`end_of_turn.py`).

The classes of words are those of grammars. Conjunctions, determiners, prepositions and auxiliaries begin a phrase, so
more words have to follow (Quirk et al. 1985, A Comprehensive Grammar of the English Language, chapter 2). Fillers
announce a delay (Clark & Fox Tree 2002, Using uh and um in spontaneous speaking).
"""

from __future__ import annotations

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
# Fewer than MIN_GROUPS groups of digits are not a dictation ("at seven"). WHOLE_DIGITS digits or more are a complete
# telephone or card number.
MIN_GROUPS, WHOLE_DIGITS = 2, 7

_DANGLING_SETS = {k: frozenset(v.split()) for k, v in _DANGLING.items()}
_AUXILIARY_SETS = {k: frozenset(v.split()) for k, v in _AUXILIARY.items()}
_COMPLETE = frozenset(_COMPLETE_LIST.split())
_NUMBER_WORDS = frozenset(_NUMBER_LIST.split())
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
    return WordCues(
        mark=_mark(tail),
        dangling=last_part in _DANGLING_SETS.get(language, ()),
        auxiliary=last in _AUXILIARY_SETS.get(language, ()) and not filler,
        filler=filler,
        dictating=_dictating(tail),
        complete=0 < len(words) <= MAX_COMPLETE_WORDS and all(w in _COMPLETE for w in words),
    )


def _mark(tail: str) -> Mark:
    if tail.endswith(("...", "\u2026", ",", ";", ":", "-", "\u2013", "\u2014", "\u3001", "\uff0c")):
        return "open"
    if tail.endswith(("?", "\uff1f")):
        return "question"
    return "stop" if tail.endswith((".", "!", "\u3002", "\uff01")) else "none"


def _dictating(tail: str) -> bool:
    """Return whether the text ends in groups of digits, number words or spelled letters that may continue."""
    groups = digits = 0
    for written in ("-", "\u2013", ",", "."):
        tail = tail.replace(written, " ")
    for token in reversed(tail.split()):
        word = bare_word(token)
        if word.isdecimal() and len(word) <= WHOLE_DIGITS:
            digits += len(word)
        elif word in _NUMBER_WORDS:
            digits += 1
        elif not (len(word) == 1 and word.isalpha() and token.isupper()):
            break
        groups += 1
    return groups >= MIN_GROUPS and digits < WHOLE_DIGITS
