"""The client's connections over the network, and the certificates that it trusts at https:// addresses.

These are the system's, those in a file, or one by its fingerprint.
"""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect

from antiphon.errors import RemoteError

# Timeouts of connecting and of closing, in seconds.
CONNECT_S, CLOSE_S = 10.0, 5.0
# Interval of WebSocket pings, and the time without a pong after which the connection counts as broken, in seconds.
PING_S, PING_TIMEOUT_S = 10.0, 20.0
# What OpenSSL says of a certificate that is not trusted, and what to do about it on a command line.
_UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
UNTRUSTED_HINT = (
    "its certificate is not trusted: --ca FILE trusts the certificate in a file, and --fingerprint SHA256 the one that "
    "antiphon serve printed"
)


async def connect_over_network(tls: ssl.SSLContext | None, url: str, headers: Mapping[str, str]) -> ClientConnection:
    """Open a WebSocket at a URL, for wss:// with a TLS context. Raises what `websockets.connect` raises."""
    return await connect(
        url,
        ssl=tls,
        additional_headers=headers,
        max_size=None,
        compression=None,
        open_timeout=CONNECT_S,
        close_timeout=CLOSE_S,
        ping_interval=PING_S,
        ping_timeout=PING_TIMEOUT_S,
        proxy=None,
    )


def is_untrusted(error: Exception) -> bool:
    """Return whether a connection failed because the server's certificate is not trusted."""
    return _UNTRUSTED in str(error)


def trusting(ca: str | Path | None) -> ssl.SSLContext:
    """Return a TLS context that trusts the certificates in a PEM file; None: those that the system trusts.

    Raises:
        ValueError: The file cannot be read, or has no certificate.
    """
    try:
        return ssl.create_default_context(cafile=ca)
    except ssl.SSLError:
        raise ValueError(f"{ca} has no certificate in PEM form") from None
    except OSError as error:
        raise ValueError(f"{ca}: {error.strerror}") from None


def pinned(url: str, fingerprint: str) -> ssl.SSLContext:
    """Return a TLS context that trusts only the certificate of the server at `url`, whatever the names in it.

    Blocks until the server has shown its certificate, at most CONNECT_S. No key is sent.

    Args:
        url: The server's https:// address.
        fingerprint: The SHA-256 of the certificate, as `antiphon serve --tls self-signed` prints it.

    Raises:
        RemoteError: The server cannot be reached, or its certificate is another one.
    """
    parts = urlsplit(url)
    try:
        found = ssl.get_server_certificate((parts.hostname or "", parts.port or 443), timeout=CONNECT_S)
    except OSError as error:
        raise RemoteError(f"{url} cannot be reached: {error}") from error
    shown = hashlib.sha256(ssl.PEM_cert_to_DER_cert(found)).hexdigest()
    if shown != fingerprint.replace(":", "").strip().lower():
        raise RemoteError(f"{url} has another certificate than --fingerprint: SHA-256 {shown}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # The certificate may be one that an authority signed: it is trusted without it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=found)
    return context


def trusted(url: str, ca: str | None, fingerprint: str | None) -> ssl.SSLContext | None:
    """Return the TLS context for a server, by the options of a command; None for a URL without TLS. Blocks.

    Raises what `pinned` and `trusting` raise, and ValueError for both options.
    """
    if not url.startswith("https:"):
        return None
    if ca and fingerprint:
        raise ValueError("give either --ca or --fingerprint")
    return pinned(url, fingerprint) if fingerprint else trusting(ca)
