"""Which language a text is written in."""

from __future__ import annotations

from collections.abc import Callable, Collection

# Languages with scripts of their own, and Vietnamese.
OTHERS = frozenset(
    (
        "zh",
        "ja",
        "th",
        "vi",
        "he",
        "fa",
        "ur",
        "ka",
        "hy",
        "bn",
        "ta",
        "te",
        "ml",
        "kn",
        "gu",
        "pa",
        "mr",
        "am",
        "km",
        "lo",
    )
)

# Languages that a text is told from where a voice speaks only its own.
OTHERS_OF_ONE_VOICE = frozenset(
    [
        *("en", "de", "es", "fr", "it", "nl", "pl", "sv", "da", "fi", "cs", "ro", "hu", "el", "ru", "uk", "tr", "ar"),
        *("hi", "ko", "pt", "no"),
    ]
)


def language_finder(languages: Collection[str]) -> Callable[[str], tuple[str, float]]:
    """Return what finds the likeliest language of a text, ISO-639-1, and its probability. Takes a second.

    py3langid's naive Bayes over byte n-grams. It chooses among these languages, and some that nobody may take for one
    of them: a finder that knows no Chinese is sure that it is Korean.
    """
    # Its model is unpacked when it is imported, which only those wait for who need it.
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    identifier.set_languages(sorted((set(languages) | OTHERS) & set(identifier.labels)))

    def likeliest(text: str) -> tuple[str, float]:
        language, probability = identifier.rank(text)[0]
        return str(language), float(probability)

    return likeliest
