"""Word error rate, or character error rate in scripts without spaces, after a light normalization.

Normalization makes text lowercase, spells out digits (English), expands a few abbreviations, unifies British and
American spellings, and drops punctuation except apostrophes inside words.
"""

from __future__ import annotations

import re
import unicodedata

from antiphon.certify.single_caller import num_word_errors

ABBREVIATIONS = {"mr": "mister", "mrs": "missus", "dr": "doctor", "st": "saint", "ok": "okay", "etc": "et cetera"}
SPELLINGS = {
    "colour": "color", "favour": "favor", "honour": "honor", "labour": "labor", "neighbour": "neighbor",
    "centre": "center", "grey": "gray", "mould": "mold", "theatre": "theater", "travelled": "traveled",
    "counsellor": "counselor", "licence": "license", "defence": "defense", "to-day": "today",
}  # fmt: skip
ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = ["-", "-", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
UNSPACED = ("zh", "ja", "ko", "yue")


def spelled(n: int) -> str:
    """Return an English number in words. From a million on, each digit is a word."""
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10] + (f" {ONES[n % 10]}" if n % 10 else "")
    if n < 1000:
        return f"{ONES[n // 100]} hundred" + (f" {spelled(n % 100)}" if n % 100 else "")
    if n < 10**6:
        return f"{spelled(n // 1000)} thousand" + (f" {spelled(n % 1000)}" if n % 1000 else "")
    return str(n)


def norm(text: str, language: str = "en", *, digit_by_digit: bool = False) -> list[str]:
    """Return the words (or characters) to compare. A numeral becomes the words of the number, or of its digits."""
    text = unicodedata.normalize("NFKC", text).lower().replace("’", "'").replace("‘", "'")
    if language == "en":
        text = re.sub(r"(?<=\d),(?=\d{3})", "", text)
        numeral = r"\d" if digit_by_digit else r"\d+"
        text = re.sub(numeral, lambda m: f" {spelled(int(m[0]))} ", text).replace("%", " percent ")
    text = "".join(c if c == "'" or unicodedata.category(c)[0] in "LNM" else " " for c in text)
    if language in UNSPACED:
        return list(re.sub(r"[\s']", "", text))
    words = [w for w in (w.strip("'") for w in text.split()) if w]
    if language != "en":
        return words
    return " ".join(SPELLINGS.get(w, w) for w in (ABBREVIATIONS.get(w, w) for w in words)).split()


def score(reference: str, heard: str, language: str = "en") -> tuple[int, int]:
    """Return (errors, words of the reference).

    Numerals in `heard` are read in whichever of the two ways fits better.
    """
    a = norm(reference, language)
    readings = (norm(heard, language, digit_by_digit=one_by_one) for one_by_one in (False, True))
    return min(num_word_errors(a, b) for b in readings), len(a)
