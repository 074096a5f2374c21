"""The TLS context of a server, from a certificate and a key."""

from __future__ import annotations

import ssl

from riptide.base.errors import InputError
from riptide.base.wording import Parameter


class _KeyHasPasswordError(Exception):
    """A key is encrypted, and a server cannot ask for its password."""


def open_tls(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """Returns the TLS context of a server (TLS 1.2 and later); None without a certificate and a key.

    Args:
        certificate: PEM file of the certificate, followed by those of the authorities in between.
        key: PEM file of its private key, without a password.

    Raises:
        InputError: If only one of them is given, or if they cannot be used.
    """
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        missing = "tls_key" if key is None else "tls_certificate"
        raise InputError(f"{Parameter(missing)} is missing: TLS needs a certificate and its key: give both, or neither")
    for name, file in (("tls_certificate", certificate), ("tls_key", key)):
        try:
            with open(file, "rb"):
                pass
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{Parameter(name, file)}: {reason}: expected a readable PEM file") from error

    def refuse_password() -> str:
        raise _KeyHasPasswordError

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, refuse_password)
    except _KeyHasPasswordError:
        raise InputError(
            f"{Parameter('tls_key', key)}: the key has a password: expected one without (openssl pkey)"
        ) from None
    except OSError as error:  # ssl.SSLError is one
        reason = (getattr(error, "reason", None) or "no PEM").replace("_", " ")
        raise InputError(
            f"{Parameter('tls_certificate', certificate)}, {Parameter('tls_key', key)}: found {reason}: expected a "
            "certificate and its key in PEM form"
        ) from error
    return context
