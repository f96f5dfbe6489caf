"""A server's TLS: its certificate, which is read again when its files change, and self-signed certificates.

Needs the extra `[tls]`. Certificates and keys are PEM files.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import shlex
import socket
import ssl
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import anyio.to_thread

from antiphon.errors import SettingsError
from antiphon.extras import require_extra
from antiphon.server.http.listening import is_wildcard
from antiphon.settings import ServerSettings, Settings

log = logging.getLogger(__name__)
# Interval at which the files are checked for changes.
CHECK_S = 2.0
# Days that a self-signed certificate is valid, which is the most that Apple's systems accept, and days before its end
# when a start makes a new one.
VALID_DAYS, RENEWED_DAYS = 825, 30
# Below the models' folder: a file with the self-signed certificate and its key, and a copy of the certificate alone,
# for clients.
FOLDER, SELF_SIGNED, FOR_CLIENTS = "tls", "self-signed.pem", "certificate.pem"


@dataclass(frozen=True, slots=True)
class TlsCertificate:
    """A certificate with its key, ready for handshakes."""

    # The context of handshakes with it.
    context: ssl.SSLContext
    # SHA-256 of the certificate as browsers show it: bytes in hexadecimal, with colons.
    fingerprint: str
    # DNS names and addresses.
    names: frozenset[str]
    # The time from which it is valid.
    begins: datetime
    # The time after which it is not.
    ends: datetime

    def fault(self, now: datetime) -> str:
        """Return why clients refuse the certificate now; "" if its dates are valid."""
        if now > self.ends:
            return f"the certificate expired on {self.ends:%Y-%m-%d %H:%M} UTC"
        return f"the certificate is not valid before {self.begins:%Y-%m-%d %H:%M} UTC" if now < self.begins else ""


class ServerTls:
    """The certificate of a server. `current` is replaced when the files change.

    Raises SettingsError if a file cannot be read, if the key is not that of the certificate, or if the certificate has
    expired and `allow_expired` is false.
    """

    def __init__(self, cert: Path, key: Path, *, allow_expired: bool = False) -> None:
        self.cert, self._key, self._allow_expired = cert, key, allow_expired
        self._stamp = self._stamped()
        self._faults = set[str]()
        self.current = self._read()
        self._note_fault()

    def context(self) -> ssl.SSLContext:
        """Return the context for the next handshake."""
        return self.current.context

    def reload(self) -> bool:
        """Read the files again if they have changed. Returns whether there is a new certificate.

        If the files are invalid, as when only one of them is written yet, the certificate stays, and the error is
        logged once. An expired certificate is logged once, too. Blocks.
        """
        self._note_fault()
        stamp = self._stamped()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self.current = self._read()
        except SettingsError as error:
            log.error("the certificate stays as it was: %s", error)
            return False
        log.info("the certificate was read again: SHA-256 %s", self.current.fingerprint)
        self._note_fault()
        return True

    def _read(self) -> TlsCertificate:
        found = read_certificate(self.cert, self._key)
        if (fault := found.fault(datetime.now(UTC))) and not self._allow_expired:
            raise SettingsError(f"--tls-cert {self.cert}: {fault}; --tls-allow-expired serves with it")
        return found

    def _note_fault(self) -> None:
        fault = self.current.fault(datetime.now(UTC))
        if fault and fault not in self._faults:
            log.error("%s: clients refuse it until %s is replaced", fault, self.cert)
            self._faults.add(fault)

    def _stamped(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Return what tells a changed file: its time, its size and its number."""
        return tuple(_stamp(path) for path in (self.cert, self._key))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


async def keep_current(tls: ServerTls) -> None:
    """Read the certificate again whenever its files change, until cancelled."""
    while True:
        await anyio.sleep(CHECK_S)
        await anyio.to_thread.run_sync(tls.reload)


def open_tls(settings: Settings) -> ServerTls | None:
    """Return the TLS of these settings; None without TLS. Makes a self-signed certificate if there is none. Blocks.

    Raises SettingsError if a certificate or a key cannot be used, or if the extra is missing.
    """
    own, is_made = settings.tls, settings.tls.tls == "self-signed"
    if not (is_made or own.tls_cert or own.tls_key):
        return None
    if is_made and (own.tls_cert or own.tls_key):
        raise SettingsError("give either --tls self-signed, or --tls-cert and --tls-key")
    if not is_made and not own.tls_key:
        raise SettingsError("--tls-cert needs --tls-key, the file of the certificate's key")
    if not is_made and not own.tls_cert:
        raise SettingsError("--tls-key needs --tls-cert, the file of the key's certificate")
    require_extra("tls", "TLS")
    if is_made:
        home = Path(settings.models.home).expanduser()
        file = self_signed(home / FOLDER, own_names(settings.server), datetime.now(UTC))
        return ServerTls(file, file)
    files = (Path(name).expanduser() for name in (own.tls_cert, own.tls_key))
    return ServerTls(*files, allow_expired=own.tls_allow_expired)


def described(tls: ServerTls, server: ServerSettings, url: str) -> tuple[list[str], str, str]:
    """Describe the certificate of a server at `url` for an operator.

    Returns lines for the terminal, a URL that the certificate names, and curl's option to trust the certificate.
    """
    found, port, trust = tls.current, url.rpartition(":")[2], ""
    lines = [f"certificate: SHA-256 {found.fingerprint}, valid until {found.ends:%Y-%m-%d}"]
    if tls.cert.name == SELF_SIGNED:
        for_clients = tls.cert.with_name(FOR_CLIENTS)
        lines.append(f"for clients: {for_clients}")
        trust = f" --cacert {shlex.quote(str(for_clients))}"
    if is_wildcard(server.host):
        url = f"https://localhost:{port}"
        found_here = [name for name in own_names(server) if (ip := _address(name)) and ip.version == 4]
        lines.append(f"addresses:   {', '.join(f'https://{name}:{port}' for name in found_here)}")
    return lines, url, trust


def read_certificate(cert: Path, key: Path) -> TlsCertificate:
    """Read a certificate, with its chain, and its key.

    Raises SettingsError, which names the file, if one cannot be read or the key is that of another certificate.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256

    leaf = None
    for flag, path in (("--tls-key", key), ("--tls-cert", cert)):
        try:
            data = path.read_bytes()
            leaf = x509.load_pem_x509_certificates(data)[0] if path == cert else None
        except OSError as error:
            raise SettingsError(f"{flag} {path}: {error.strerror}") from None
        except ValueError:
            raise SettingsError(f"{flag} {path}: there is no certificate in PEM form in it") from None
    assert leaf
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])

    def no_password() -> str:
        # Without this, OpenSSL asks for the password on the terminal.
        raise SettingsError(f"--tls-key {key}: the key is encrypted; a key without a password is needed")

    try:
        context.load_cert_chain(cert, key, no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise SettingsError(f"--tls-key {key}: it is not the key of the certificate {cert}") from None
        raise SettingsError(f"--tls-key {key}: there is no private key in PEM form in it") from None
    try:
        found = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = found.get_values_for_type(x509.DNSName)
        names += [str(address) for address in found.get_values_for_type(x509.IPAddress)]
    except x509.ExtensionNotFound:
        names = []
    return TlsCertificate(
        context,
        leaf.fingerprint(SHA256()).hex(":").upper(),
        frozenset(names),
        leaf.not_valid_before_utc,
        leaf.not_valid_after_utc,
    )


# --- self-signed certificates -----------------------------------------------------------------------------------------


def own_names(server: ServerSettings) -> list[str]:
    """Return the names and addresses at which clients may reach this machine, those that are loopback first."""
    import ifaddr

    host = socket.gethostname()
    names = ["localhost", "127.0.0.1", "::1", host, f"{host.split('.')[0]}.local", server.host, *server.allowed_hosts]
    for adapter in ifaddr.get_adapters():
        # The address of IPv6 is a tuple.
        names += [ip.ip if isinstance(ip.ip, str) else ip.ip[0] for ip in adapter.ips]
    names = [name.lower() for name in names if name.isascii() and name != "*" and not is_wildcard(name)]
    return [name for name in dict.fromkeys(names) if not ((ip := _address(name)) and ip.is_link_local)]


def self_signed(folder: Path, names: Iterable[str], now: datetime) -> Path:
    """Return the file of the self-signed certificate in `folder`, and of its key.

    It is kept until shortly before its end. It is made again if it lacks one of `names`, apart from addresses of IPv6,
    which systems change every day. Raises SettingsError if the folder cannot be written.
    """
    file, names = folder / SELF_SIGNED, list(names)
    needed = {name for name in names if (ip := _address(name)) is None or ip.version == 4}
    try:
        kept = read_certificate(file, file)
    except SettingsError:
        kept = None
    if kept and needed <= kept.names and kept.ends - now > timedelta(days=RENEWED_DAYS) and not kept.fault(now):
        return file
    key, cert = _made(names, now)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(folder / FOR_CLIENTS, cert, 0o644)
        _write(file, key + cert, 0o600)
    except OSError as error:
        raise SettingsError(f"--tls self-signed: {folder} cannot be written: {error.strerror}") from None
    return file


def _made(names: list[str], now: datetime) -> tuple[bytes, bytes]:
    """Return a new key and its certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "antiphon")])
    alternatives = [x509.IPAddress(ip) if (ip := _address(one)) else x509.DNSName(one) for one in names]
    builder = x509.CertificateBuilder(
        issuer_name=name,
        subject_name=name,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        # Clocks of clients may be slow.
        not_valid_before=now - timedelta(hours=1),
        not_valid_after=now - timedelta(hours=1) + timedelta(days=VALID_DAYS),
    )
    for extension, is_critical in (
        (x509.SubjectAlternativeName(alternatives), False),
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
    ):
        builder = builder.add_extension(extension, is_critical)
    cert = builder.sign(key, SHA256())
    return (
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        cert.public_bytes(Encoding.PEM),
    )


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _write(path: Path, data: bytes, mode: int) -> None:
    """Write a file as a whole: another process sees the old or the new one."""
    descriptor, unfinished = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        file.write(data)
    os.replace(unfinished, path)
