"""HTTPS: the context of ``--ssl-certfile`` and its kin."""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
from typing import Any

from ..proto.config import ConfigError, EngineArgs

log = logging.getLogger(__name__)


def context_of(args: EngineArgs) -> ssl.SSLContext | None:
    """How connections are encrypted; None: they are not. Raises ConfigError where a file cannot be used."""
    if not args.ssl_certfile:
        return None
    try:
        context = _made(args)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(filter(None, (args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs)))
        why = error.strerror if isinstance(error, FileNotFoundError) else str(error)
        raise ConfigError(
            f"HTTPS cannot be set up of {files}: {why}; --ssl-certfile and --ssl-keyfile must be PEM files that belong "
            "together, --ssl-ca-certs one of certificates, --ssl-ciphers names that OpenSSL knows."
        ) from error
    if args.enable_ssl_refresh:
        _keep_fresh(context, args)
    return context


def _made(args: EngineArgs) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    context.verify_mode = ssl.VerifyMode(args.ssl_cert_reqs)
    context.load_cert_chain(str(args.ssl_certfile), args.ssl_keyfile)
    if args.ssl_ca_certs:
        context.load_verify_locations(args.ssl_ca_certs)
    if args.ssl_ciphers:
        context.set_ciphers(args.ssl_ciphers)
    return context


def _keep_fresh(context: ssl.SSLContext, args: EngineArgs) -> None:
    """Look at the files whenever somebody connects; where they have changed, that connection has the new ones."""
    files = (args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs)
    known, current = _stamp(*files), context

    def connecting(connection: Any, name: str | None, _: ssl.SSLContext) -> None:
        nonlocal known, current
        if (found := _stamp(*files)) != known:
            try:
                current, known = _made(args), found
                log.info("the certificate has been read again")
            except (OSError, ssl.SSLError) as error:  # half written: the next connection looks again
                log.warning("the new certificate cannot be used yet: %s", error)
        if current is not context:
            connection.context = current

    context.sni_callback = connecting


def _stamp(*paths: str | None) -> list[tuple[int, int]]:
    """What changes when one of the files does."""
    found = []
    for path in filter(None, paths):
        with contextlib.suppress(OSError):
            status = os.stat(path)
            found.append((status.st_mtime_ns, status.st_ino))
    return found
