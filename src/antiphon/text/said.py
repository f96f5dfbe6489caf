"""What was said in a session so far, as text for a model that continues the session. Pure."""

from __future__ import annotations

from collections.abc import Iterable

# The first line of the text. The names of the speakers follow at the beginning of each line.
BEGINS = "The conversation has already begun. So far:"
USER, MODEL, SYSTEM = "User", "You", "System"
# Maximum characters of what was said. The newest are used.
MAX_CHARS = 4000


def said_so_far(lines: Iterable[tuple[str, str]]) -> str:
    """Return what was said, a line for each pair of speaker and words; "" if nothing was said.

    Of a long conversation, the newest MAX_CHARS are used.
    """
    said = "\n".join(f"{speaker}: {words}" for speaker, words in lines if words.strip())
    return f"{BEGINS}\n{said[-MAX_CHARS:]}" if said else ""
