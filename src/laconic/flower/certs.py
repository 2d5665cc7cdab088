"""A certificate authority for tests and trials, a server certificate, and a key for every node.

A real federation has an authority of its own, and each node makes its key where it stays: on its own machine.
"""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import Any

from laconic.core import ConfigError, RunError
from laconic.engine.files import cannot_write, write_atomically


def make_certs(
    folder: Path, *, hosts: list[str], nodes: int, days: int = 365, since: datetime.datetime | None = None
) -> list[Path]:
    """Write `ca.crt`, `ca.key`, `server.pem`, `server.key` and `node-N.key`, `node-N.pub` into a folder.

    Certificates are good for so many days from `since` on (now).
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError:
        raise ConfigError("certificates need the extra flower; pip install 'laconic[flower]'.") from None
    if nodes < 1 or days < 1 or not hosts:
        raise ConfigError("certificates need at least one host, one node and one day.")
    if (folder / "ca.key").exists():
        raise RunError(f"{folder} already holds keys; remove them first if they are to be made anew.")
    since = since or datetime.datetime.now(datetime.UTC)

    def signed(name: str, key: Any, issuer: x509.Name, by: Any, *extensions: tuple[Any, bool]) -> Any:
        builder = (
            x509.CertificateBuilder()
            .subject_name(named(name))
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(since - datetime.timedelta(minutes=5))
            .not_valid_after(since + datetime.timedelta(days=days))
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(by, hashes.SHA384())

    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    def usage(*, authority: bool) -> tuple[Any, bool]:
        absent = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"), False
        )
        made = x509.KeyUsage(
            digital_signature=not authority,
            key_cert_sign=authority,
            crl_sign=authority,
            decipher_only=False,
            **absent,
        )
        return made, True

    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    ca_name = named("laconic test authority")
    identity = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    ca = signed(
        "laconic test authority",
        authority,
        ca_name,
        authority,
        (x509.BasicConstraints(ca=True, path_length=0), True),
        usage(authority=True),
        (identity, False),
    )
    certificate = signed(
        hosts[0],
        server,
        ca_name,
        authority,
        (x509.BasicConstraints(ca=False, path_length=None), True),
        usage(authority=False),
        (x509.SubjectAlternativeName([_alternative(host) for host in hosts]), False),
        (x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identity), False),
    )
    plain = serialization.NoEncryption()
    pem, openssh = serialization.Encoding.PEM, serialization.Encoding.OpenSSH
    secrets = {
        name: key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
        for name, key in (("ca.key", authority), ("server.key", server))
    }
    public = {"ca.crt": ca.public_bytes(pem), "server.pem": certificate.public_bytes(pem)}
    for node in range(nodes):
        key = ec.generate_private_key(ec.SECP384R1())
        secrets[f"node-{node}.key"] = key.private_bytes(pem, serialization.PrivateFormat.OpenSSH, plain)
        public[f"node-{node}.pub"] = key.public_key().public_bytes(openssh, serialization.PublicFormat.OpenSSH)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise cannot_write(folder, error) from None
    for name, data in {**secrets, **public}.items():
        write_atomically(folder / name, data)
        (folder / name).chmod(0o600 if name in secrets else 0o644)
    return [folder / name for name in (*public, *secrets)]


def _alternative(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
