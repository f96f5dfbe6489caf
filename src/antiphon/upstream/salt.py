"""What keeps the rows of one owner apart from those of others in the prefix cache of a server."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Hashable


def salt_of(secret: bytes, owner: Hashable | None) -> str:
    """The salt of an owner's requests: the same for the same owner, and not to be guessed without `secret`.

    Requests with different salts share nothing, so that neither cached tokens nor times tell an owner what another has
    said. None shares with nobody: it gets a new salt each time.
    """
    if owner is None:
        return secrets.token_hex(32)
    return hmac.new(secret, repr(owner).encode(), hashlib.sha256).hexdigest()
