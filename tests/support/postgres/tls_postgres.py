"""Postgres behind TLS, with a certificate by an authority of its own: a proxy that takes nothing but TLS.

The embedded Postgres is built without it, so TLS ends here, as it does at a PgBouncer or at a cloud's proxy. What
libpq and the JDBC driver see of it is real: the handshake, and the certificate that they check.
"""

import select
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from sqlalchemy import make_url

ROOT = "root.pem"
SSL_REQUEST = struct.pack("!II", 8, 80877103)
NO_TLS = b"ESFATAL\0C28000\0Mthis server takes TLS alone\0\0"


@contextmanager
def behind_tls(url: str, folder: Path) -> Iterator[str]:
    """Start a proxy before a server, and return the URL that leads through it, with ``sslmode=verify-full``.

    ``folder`` gets the root certificate that clients need, as ``ROOT``; the URL names no file.
    """
    root, certificate, key = _certificates()
    (folder / ROOT).write_bytes(root)
    (folder / "server.pem").write_bytes(certificate + key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    place = make_url(url)
    server = (place.host or "127.0.0.1", place.port or 5432)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept, args=(listener, context, server), daemon=True).start()
        through = place.set(host="127.0.0.1", port=listener.getsockname()[1])
        yield through.update_query_dict({"sslmode": "verify-full"}).render_as_string(hide_password=False)
        listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, context: ssl.SSLContext, server: tuple[str, int]) -> None:
    with suppress(OSError):  # until it is closed
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_serve, args=(client, context, server), daemon=True).start()


def _serve(client: socket.socket, context: ssl.SSLContext, server: tuple[str, int]) -> None:
    with client, suppress(OSError):  # a handshake that fails is the client's to report
        if client.recv(8, socket.MSG_WAITALL) != SSL_REQUEST:
            client.sendall(b"E" + struct.pack("!I", len(NO_TLS) + 3) + NO_TLS[1:])
            return
        client.sendall(b"S")
        with context.wrap_socket(client, server_side=True) as secure, socket.create_connection(server) as plain:
            while True:
                ready = [secure] if secure.pending() else select.select([secure, plain], [], [])[0]
                for one, other in ((secure, plain), (plain, secure)):
                    if one in ready:
                        data = one.recv(65536)
                        if not data:
                            return
                        other.sendall(data)


def _certificates() -> tuple[bytes, bytes, bytes]:
    """Return the authority's certificate, and the server's with its key."""
    authority, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root = _signed("an authority of the tests", authority, "an authority of the tests", authority, authority=True)
    leaf = _signed("127.0.0.1", server, "an authority of the tests", authority, authority=False)
    pem = serialization.Encoding.PEM
    key = server.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return root.public_bytes(pem), leaf.public_bytes(pem), key


def _signed(
    name: str, key: ec.EllipticCurvePrivateKey, by: str, with_key: ec.EllipticCurvePrivateKey, *, authority: bool
) -> x509.Certificate:
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(by))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    )
    if not authority:
        addresses = x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))])
        builder = builder.add_extension(addresses, critical=False)
    return builder.sign(with_key, hashes.SHA256())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
