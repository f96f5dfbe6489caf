"""Which language a text is written in."""

from __future__ import annotations

from collections.abc import Callable, Collection


def language_finder(languages: Collection[str]) -> Callable[[str], tuple[str, float]]:
    """Return what finds the likeliest of these languages (ISO-639-1) for a text, and its probability. Takes a second.

    py3langid's naive Bayes over byte n-grams. Languages that it does not know are left out.
    """
    # Its model is unpacked when it is imported, which only those wait for who need it.
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    identifier.set_languages(sorted(set(languages) & set(identifier.labels)))

    def likeliest(text: str) -> tuple[str, float]:
        language, probability = identifier.rank(text)[0]
        return str(language), float(probability)

    return likeliest
