"""``quire keygen FILE``: the key pair of a deployment whose processes meet over tcp."""

from __future__ import annotations

import argparse
from typing import Any

from .main import CommandError


def add_parser(subparsers: Any) -> None:
    """The command's flags."""
    parser = subparsers.add_parser("keygen")
    parser.add_argument("file", help="where to write it (mode 0600); give it to each process with --keys")
    parser.set_defaults(run=keygen)


def keygen(args: argparse.Namespace) -> int:
    """Write a new key file; never over another."""
    from ..proto.sockets import Keys

    try:
        Keys.generate().save(args.file)
    except FileExistsError:
        raise CommandError(f"{args.file} exists; remove it, or name another file.") from None
    except OSError as error:
        raise CommandError(f"cannot write {args.file}: {error.strerror}.") from None
    print(f"wrote {args.file}; give it to every process with --keys {args.file}")
    return 0
