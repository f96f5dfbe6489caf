"""Sessions that may be what ends their hosts: they are restored later each time, and in the end not at all.

Nobody knows which of its sessions has ended a host. One that has something to do as soon as it is restored, a response
that is owed for instance, is suspected after the first death; any other only after several, since what ends a host may
also be a message that is sent again. Suspects wait for a random time, and longer each time, so that they are not tried
together: one that is innocent then gets its turn done before the guilty one is tried, and is suspected no longer.
"""

from __future__ import annotations

import random

import msgspec

from antiphon.errors import RemoteProtocolError
from antiphon.server.live.moving.continuation import OpenResponse
from antiphon.store.sessions import StoredSession

# So many hosts in turn may restore a session that has something to do, or has not, before a turn of it is kept.
MAX_RESTORES, MAX_IDLE_RESTORES = 3, 12
# A suspect waits up to 1 s at its first restoration as one, and up to twice as long at each after that, to this.
MAX_DELAY_S = 4.0


class _Due(msgspec.Struct):
    owed: list[msgspec.Raw] = []
    unread_items: list[str] = []
    open_response: OpenResponse | None = None


class _Snapshot(msgspec.Struct):
    continued: _Due | None = None


def delay_s(row: StoredSession) -> float:
    """How long a session that is about to be claimed has to wait, in seconds: 0 for one that is not suspected.

    Raises RemoteProtocolError (`restored_too_often`) for one that is not restored any more.
    """
    if row.restores == 0:
        return 0.0
    due = _due(row)
    has_work = bool(due.owed or due.unread_items or due.open_response)
    limit = MAX_RESTORES if has_work else MAX_IDLE_RESTORES
    if row.restores >= limit:
        text = f"{limit} servers in turn have restored this session and did not live to its next turn."
        raise RemoteProtocolError("restored_too_often", text, "session_id")
    times = row.restores if has_work else row.restores - MAX_RESTORES
    return random.uniform(0.0, min(2.0 ** (times - 1), MAX_DELAY_S)) if times > 0 else 0.0


def _due(row: StoredSession) -> _Due:
    try:
        return msgspec.json.decode(row.snapshot, type=_Snapshot).continued or _Due()
    except msgspec.MsgspecError:
        # Whoever restores it says so.
        return _Due()
