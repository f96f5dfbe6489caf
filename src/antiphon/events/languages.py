"""The names and codes of spoken languages, as clients and other servers write them. Pure."""

from __future__ import annotations

_LANGUAGES = """
    af:afrikaans am:amharic ar:arabic as:assamese az:azerbaijani ba:bashkir be:belarusian bg:bulgarian bn:bengali
    bo:tibetan br:breton bs:bosnian ca:catalan cs:czech cy:welsh da:danish de:german el:greek en:english es:spanish
    es:castilian et:estonian eu:basque fa:persian fa:farsi fi:finnish fo:faroese fr:french gl:galician gu:gujarati
    ha:hausa haw:hawaiian he:hebrew hi:hindi hr:croatian ht:haitian hu:hungarian hy:armenian id:indonesian
    is:icelandic it:italian ja:japanese jw:javanese ka:georgian kk:kazakh km:khmer kn:kannada ko:korean la:latin
    lb:luxembourgish ln:lingala lo:lao lt:lithuanian lv:latvian mg:malagasy mi:maori mk:macedonian ml:malayalam
    mn:mongolian mr:marathi ms:malay mt:maltese my:burmese my:myanmar ne:nepali nl:dutch nl:flemish nn:nynorsk
    no:norwegian oc:occitan pa:punjabi pl:polish ps:pashto pt:portuguese ro:romanian ru:russian sa:sanskrit
    sd:sindhi si:sinhala sk:slovak sl:slovenian sn:shona so:somali sq:albanian sr:serbian su:sundanese sv:swedish
    sw:swahili ta:tamil te:telugu tg:tajik th:thai tk:turkmen tl:tagalog tl:filipino tr:turkish tt:tatar
    uk:ukrainian ur:urdu uz:uzbek vi:vietnamese yi:yiddish yo:yoruba yue:cantonese zh:chinese zh:mandarin
"""
# For each language that models know: its code, by its English name.
LANGUAGE_NAMES = {name: code for code, name in (pair.split(":") for pair in _LANGUAGES.split())}
# For each alternative code that clients send and models do not know: the code that models use.
_OTHER_CODES = {"cmn": "zh", "fil": "tl", "in": "id", "iw": "he", "ji": "yi", "jv": "jw", "nb": "no"}


def language_code(language: str) -> str:
    """Convert the name, code or locale of a language into its code: `English`, `EN` and `en-US` become `en`."""
    named = language.strip().lower()
    code = LANGUAGE_NAMES.get(named) or named.replace("_", "-").partition("-")[0]
    return _OTHER_CODES.get(code, code)
