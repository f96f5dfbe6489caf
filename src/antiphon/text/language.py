"""Detects the language of a written text."""

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

# Languages from which a text is distinguished if the voice speaks only one language.
OTHERS_OF_ONE_VOICE = frozenset(
    [
        *("en", "de", "es", "fr", "it", "nl", "pl", "sv", "da", "fi", "cs", "ro", "hu", "el", "ru", "uk", "tr", "ar"),
        *("hi", "ko", "pt", "no"),
    ]
)


def language_finder(languages: Collection[str]) -> Callable[[str], tuple[str, float]]:
    """Return a function that finds the likeliest language of a text (ISO 639-1) and its probability. Takes a second.

    Uses py3langid's naive Bayes over byte n-grams. The function chooses among `languages` and some other languages that
    are unlikely to be mistaken for one of them. Without these, for example without Chinese, it would be sure that
    Chinese is Korean.
    """
    # The import unpacks the library's model, so it is here, where only callers that need it wait for it.
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    identifier.set_languages(sorted((set(languages) | OTHERS) & set(identifier.labels)))

    def likeliest(text: str) -> tuple[str, float]:
        language, probability = identifier.rank(text)[0]
        return str(language), float(probability)

    return likeliest
