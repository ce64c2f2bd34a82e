# SPDX-License-Identifier: Apache-2.0
"""A certificate authority of one's own: signs for servers of this machine, in files that OpenSSL reads."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_SIGNS = x509.KeyUsage(
    key_cert_sign=True, crl_sign=True, digital_signature=False, content_commitment=False, key_encipherment=False,
    data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
)  # fmt: skip


class Authority:
    """`certificate`: what trusts it. `sign` gives (certificate, key) of a server."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        made = self._builder(self._name, self._key.public_key(), ends_in_days=2)
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        made = made.add_extension(_SIGNS, critical=True)
        self.certificate = directory / f"{name}.pem"
        self.certificate.write_bytes(_pem(made.sign(self._key, hashes.SHA256())))

    def sign(
        self, name: str, *, host: str = "127.0.0.1", ends_in_days: int = 2, password: str = ""
    ) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = self._builder(own, key.public_key(), ends_in_days)
        alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
        signed = made.add_extension(alternative, critical=False).sign(self._key, hashes.SHA256())
        certificate, secret = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        certificate.write_bytes(_pem(signed))
        hidden: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password:
            hidden = serialization.BestAvailableEncryption(password.encode())
        secret.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden))
        return certificate, secret

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, ends_in_days: int
    ) -> x509.CertificateBuilder:
        """Valid since ten days ago. With the identifiers that strict verifiers ask for: Python's since 3.13."""
        now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
        made = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key)
        made = made.serial_number(x509.random_serial_number()).not_valid_before(now - 10 * day)
        made = made.not_valid_after(now + ends_in_days * day)
        made = made.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return made.add_extension(issuer, critical=False)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
