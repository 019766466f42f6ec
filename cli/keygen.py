"""``quire keygen``: the keys of a deployment whose processes meet over tcp."""

from __future__ import annotations

import argparse
import os
from typing import Any

from ..proto.config import ConfigError
from .errors import CommandError


def add_parser(subparsers: Any) -> None:
    """The command's flags."""
    parser = subparsers.add_parser("keygen")
    parser.add_argument("file", help="where to write it (mode 0600); give it to each process with --keys")
    parser.add_argument(
        "--each",
        nargs="+",
        metavar="NAME",
        help="a key of its own for each of these processes: FILE is a folder of NAME.key files, and of the file "
        "`allowed` with the public keys that may connect; take a line out to lock that process out",
    )
    parser.set_defaults(run=keygen)


def keygen(args: argparse.Namespace) -> int:
    """Write new key files; never over others."""
    from ..proto.wire.keys import ALLOWED, Keys, generate_apart

    try:
        if args.each is None:
            Keys.generate().save(args.file)
            print(f"wrote {args.file}; give it to every process with --keys {args.file}")
            return 0
        made = generate_apart(args.file, args.each)
    except FileExistsError as error:
        raise CommandError(f"{error.filename or error} exists; remove it, or name another.") from None
    except ConfigError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"cannot write {error.filename or args.file}: {error.strerror}.") from None
    print(f"wrote {', '.join(made)}; give each process its own with --keys")
    print(f"the scheduler and detokenizers need {os.path.join(args.file, ALLOWED)} beside theirs: who may connect")
    return 0
