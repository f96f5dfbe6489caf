"""Which caller each key identifies, and when keys expire."""

from __future__ import annotations

import msgspec
import pytest

from antiphon.errors import Refused
from antiphon.protocols.opening import NULL
from antiphon.server import credentials
from antiphon.server.credentials import SECRET_BYTES, Caller, ClientSecret, Credentials
from antiphon.server.memory import MIB, MemoryLedger
from antiphon.settings import MemorySettings

FOREVER_S = float("inf")
SESSION = msgspec.Raw(b'{"type":"realtime"}')


def of(*api_keys: str, megabytes: int = 64) -> tuple[Credentials, MemoryLedger]:
    memory = MemoryLedger(MemorySettings(session_memory_mb=megabytes, key_memory_mb=megabytes))
    return Credentials(api_keys, memory), memory


def test_without_api_keys_everybody_is_the_same_caller() -> None:
    keys, _ = of()
    assert keys.caller(None) == keys.caller("anything") == Caller()
    assert Caller().session is NULL
    assert Caller().label == "-"


def test_an_api_key_stands_for_itself_and_an_unknown_one_for_nobody() -> None:
    keys, _ = of("alice", "bob")
    assert [keys.caller(key) for key in ("bob", "carol", "", None)] == [Caller("bob"), None, None, None]
    assert keys.secret("bob") is None


@pytest.mark.parametrize("api_keys", [(), ("alice",)])
def test_a_client_secret_is_accepted_only_where_short_lived_keys_are(api_keys: tuple[str, ...]) -> None:
    keys, _ = of(*api_keys)
    keys.add("ek_1", ClientSecret("alice", FOREVER_S, SESSION))
    assert keys.caller("ek_1") is None
    caller = keys.caller("ek_1", short=True)
    assert caller == Caller("alice", SESSION)
    assert caller is not None
    assert caller.session is SESSION


def test_a_client_secret_counts_in_memory_until_it_has_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(credentials.time, "monotonic", lambda: now_s)
    keys, memory = of()
    keys.add("old", ClientSecret("alice", 10.0, SESSION))
    assert memory.num_bytes == SECRET_BYTES + len(bytes(SESSION))
    now_s = 9.0
    assert keys.secret("old") is not None
    now_s = 10.0
    assert keys.secret("old") is None
    # The memory of the expired secret is released when its key makes another secret.
    keys.add("new", ClientSecret("alice", 20.0, SESSION))
    assert memory.num_bytes == SECRET_BYTES + len(bytes(SESSION))


def test_of_too_many_secrets_of_a_key_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "MAX_SECRETS", 3)
    keys, memory = of()
    keys.add("other", ClientSecret("bob", FOREVER_S, SESSION))
    for k in range(5):
        keys.add(f"ek_{k}", ClientSecret("alice", FOREVER_S, SESSION))
    assert [k for k in range(5) if keys.secret(f"ek_{k}") is None] == [0, 1]
    assert keys.secret("other") is not None
    assert memory.num_bytes == 4 * (SECRET_BYTES + len(bytes(SESSION)))


def test_a_secret_for_which_there_is_no_memory_is_refused_and_leaves_nothing() -> None:
    keys, memory = of(megabytes=1)
    with pytest.raises(Refused):
        keys.add("ek_1", ClientSecret("alice", FOREVER_S, msgspec.Raw(b" " * MIB)))
    assert keys.secret("ek_1") is None
    assert memory.num_bytes == 0
    # The account is closed, and the ledger has forgotten the key.
    assert memory == MemoryLedger(memory.settings, num_refused=memory.num_refused)
