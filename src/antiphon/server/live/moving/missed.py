"""What a client has missed of a host that died: frames that were stored with a snapshot and had not arrived. Pure.

A snapshot is written before its client is told of what is in it, so that a host may die in between. The next host tells
it. What it cannot tell again is the pieces of a response: where one of those is missing, the response is begun anew.
"""

from __future__ import annotations

import msgspec

from antiphon.protocols.resume.journal import SentFrame
from antiphon.server.live.moving.continuation import Continuation


def with_missed(continued: Continuation, last_received: int) -> Continuation:
    """Return where the conversation goes on for a client that has received the events up to this number.

    Its journal has what the client lacks, numbered on from there, and is whole. A finished response of which the client
    lacks a piece counts as open, and is owed.
    """
    if continued.is_whole:
        return continued
    missed = [frame for frame in continued.journal if frame.seq > last_received]
    finished = continued.finished
    lacks_pieces = bool(missed) and missed[-1].seq - last_received > len(missed)
    if lacks_pieces and finished and any(finished.response.id in str(frame.frame) for frame in missed):
        # What is told of the response once pieces are missing is told anew.
        about = {finished.response.id, *finished.response.items}
        before = _before_the_gap(missed, last_received)
        missed = before + [f for f in missed[len(before) :] if not any(id in str(f.frame) for id in about)]
        owed = [finished.request, *continued.owed]
        continued = msgspec.structs.replace(continued, open_response=finished.response, owed=owed)
    journal = [frame.renumbered(seq) for seq, frame in enumerate(missed, last_received + 1)]
    return msgspec.structs.replace(continued, journal=journal, finished=None, is_whole=True)


def _before_the_gap(missed: list[SentFrame], last_received: int) -> list[SentFrame]:
    """The first of the frames, as far as they follow each other."""
    return [frame for seq, frame in enumerate(missed, last_received + 1) if frame.seq == seq]
