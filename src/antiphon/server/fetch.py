"""Fetches files that a client names by URL. Uses only hosts that the operator lists, and no unlisted private address.

Each redirect is checked like the first URL (`remote/allowed_hosts.py`). A key has at most MAX_FETCHES_OF_KEY fetches
under way, and keys take turns, so that slow hosts of one key do not delay the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from urllib.parse import SplitResult, urljoin

import anyio
import httpcore

from antiphon.remote.allowed_hosts import AllowedHosts, NotAllowedError, refusal
from antiphon.shares.places import Places

FLAG = "--fetch-from"
# Limits of one fetch: its total time, including the wait for a place, and its redirects.
MAX_FETCH_S, MAX_REDIRECTS = 10.0, 3
# Maximum number of concurrent fetches, in all and of one key.
MAX_FETCHES, MAX_FETCHES_OF_KEY = 8, 2
# Content types that are accepted for an audio file.
AUDIO_TYPES = re.compile(r"(audio|video)/.+|application/(octet-stream|ogg)|binary/octet-stream")


class Fetcher:
    """Fetches audio files from `hosts`, as listed by `--fetch-from`; refuses every fetch if the list is empty.

    Connects to a private address only if the list contains exactly this address and port. Raises SettingsError for an
    entry that is not a host.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = AllowedHosts(hosts, FLAG)
        self._fetches = Places(MAX_FETCHES, MAX_FETCHES_OF_KEY)

    def check(self, url: str, param: str) -> None:
        """Check a URL without resolving its host.

        Raises RemoteProtocolError (`invalid_value`) that names `param` and says what is not allowed.
        """
        self._checked(url, param)

    async def audio(self, url: str, param: str, max_bytes: int) -> bytes:
        """Return the file at a URL. Waits for at most MAX_FETCH_S, including the wait for a place.

        Raises RemoteProtocolError (`invalid_value`) that names `param` and the reason: the host or address is not
        allowed (also after a redirect); the file is missing, larger than `max_bytes` or of another type; or the server
        fails or is too slow.
        """
        try:
            with anyio.fail_after(MAX_FETCH_S):
                async with self._fetches.held():
                    return await self._follow(url, param, max_bytes)
        except TimeoutError:
            raise refusal(param, f"it took longer than {MAX_FETCH_S:.0f} s") from None
        except NotAllowedError:
            raise refusal(param, "its host has no public address") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError):
            raise refusal(param, "its server cannot be reached") from None
        except UnicodeError:
            # The name has an empty label, or a label that is too long.
            raise refusal(param, "its host is not a valid name") from None

    async def _follow(self, url: str, param: str, max_bytes: int) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            parts = self._checked(url, param)
            backend = _AllowedAddresses(self._hosts)
            async with httpcore.AsyncConnectionPool(max_connections=1, network_backend=backend) as pool:
                target = parts._replace(fragment="").geturl().encode()
                headers = [("accept", "audio/*"), ("accept-encoding", "identity"), ("user-agent", "antiphon")]
                async with pool.stream("GET", target, headers=[("host", parts.netloc), *headers]) as response:
                    found = {name.lower(): value for name, value in response.headers}
                    if response.status in (301, 302, 303, 307, 308) and b"location" in found:
                        try:
                            url = urljoin(url, found[b"location"].decode("latin-1"))
                        except ValueError:
                            raise refusal(param, "it redirects to an invalid URL") from None
                        if parts.scheme == "https" and not url.startswith("https:"):
                            raise refusal(param, "it redirects from https to http")
                        continue
                    if response.status != 200:
                        raise refusal(param, f"its server answered {response.status}")
                    return await _body(response, found, param, max_bytes)
        raise refusal(param, f"it has more than {MAX_REDIRECTS} redirects")

    def _checked(self, url: str, param: str) -> SplitResult:
        if not self._hosts:
            raise refusal(param, f"nothing is fetched; give the file as base64, or start the server with {FLAG}")
        return self._hosts.check(url, param)


class _AllowedAddresses(httpcore.AsyncNetworkBackend):
    """Connects to a host's addresses if each is public, or listed with the port. TLS still verifies the host's name."""

    def __init__(self, hosts: AllowedHosts) -> None:
        self._hosts = hosts
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first address that answers.

        Raises NotAllowedError, OSError for an unknown name, and UnicodeError for an invalid name.
        """
        addresses = await self._hosts.addresses(host, port)
        for address in addresses[:-1]:
            try:
                return await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except httpcore.NetworkError:
                continue
        return await self._inner.connect_tcp(addresses[-1], port, timeout, local_address, socket_options)

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds`. The pool calls it between attempts to connect."""
        await self._inner.sleep(seconds)


async def _body(response: httpcore.Response, headers: dict[bytes, bytes], param: str, max_bytes: int) -> bytes:
    kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    if kind and not AUDIO_TYPES.fullmatch(kind):
        raise refusal(param, f"it is {kind[:80]}, not an audio file")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise refusal(param, "it is compressed")
    body = bytearray()
    async for part in response.aiter_stream():
        body += part
        if len(body) > max_bytes:
            raise refusal(param, f"at most {max_bytes >> 20} MiB")
    return bytes(body)
