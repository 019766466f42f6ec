"""``quire keygen``: the keys of a deployment whose processes meet over tcp, and API keys."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from typing import Any

from ..proto.config import ConfigError
from .errors import CommandError

LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")


def add_parser(subparsers: Any) -> None:
    """The command's flags."""
    parser = subparsers.add_parser("keygen")
    parser.add_argument(
        "file",
        nargs="?",
        help="where to write it (mode 0600); give it to each process with --keys. With --api-key: the file of serve's "
        "--api-key-file, to which the key's line is added; without FILE the line is printed",
    )
    parser.add_argument(
        "--each",
        nargs="+",
        metavar="NAME",
        help="a key of its own for each of these processes: FILE is a folder of NAME.key files, and of the file "
        "`allowed` with the public keys that may connect; take a line out to lock that process out",
    )
    parser.add_argument(
        "--api-key", metavar="NAME", help="make an API key for NAME: it is printed once, and only its hash is kept"
    )
    parser.add_argument("--requests-per-minute", metavar="N", help="requests that it may make in a minute")
    parser.add_argument("--tokens-per-minute", metavar="N", help="tokens, of prompts and outputs, in a minute")
    parser.add_argument("--concurrent-requests", metavar="N", help="requests that it may have open at once")
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="models that it is good for (default: all)")
    parser.add_argument("--expires", metavar="TIME", help="when it ends: 2027-01-31, or 2027-01-31T12:00:00Z (UTC)")
    parser.set_defaults(run=partial(keygen, parser))


def keygen(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Write new key files, never over others, or make an API key."""
    about = [name for name in (*LIMITS, "models", "expires") if getattr(args, name) is not None]
    if args.api_key is None and about:
        parser.error(f"--{about[0].replace('_', '-')} is about an API key; name that with --api-key NAME")
    if args.api_key is None and args.file is None:
        parser.error("name the FILE to write keys to, or make an API key with --api-key NAME")
    if args.api_key is not None and args.each is not None:
        parser.error("--each makes keys of processes, and --api-key one of a client; leave one of them out")
    try:
        return _wire_keys(args) if args.api_key is None else _api_key(args)
    except FileExistsError as error:
        raise CommandError(f"{error.filename or error} exists; remove it, or name another.") from None
    except ConfigError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"cannot write {error.filename or args.file}: {error.strerror}.") from None


def _wire_keys(args: argparse.Namespace) -> int:
    from ..proto.wire.keys import ALLOWED, Keys, generate_apart

    if args.each is None:
        Keys.generate().save(args.file)
        print(f"wrote {args.file}; give it to every process with --keys {args.file}")
        return 0
    made = generate_apart(args.file, args.each)
    print(f"wrote {', '.join(made)}; give each process its own with --keys")
    print(f"the scheduler and detokenizers need {os.path.join(args.file, ALLOWED)} beside theirs: who may connect")
    return 0


def _api_key(args: argparse.Namespace) -> int:
    """Print a new key, and then its line of a file; or add the line to the file that is named."""
    from ..frontend.key_file import digest_of, line_of, new_key, parse_keys, parse_line

    key = new_key()
    words = [args.api_key, f"sha256:{digest_of(key.encode()).hex()}"]
    words += [f"{name}={getattr(args, name)}" for name in LIMITS if getattr(args, name) is not None]
    words += [f"models={','.join(args.models)}"] if args.models else []
    words += [f"expires={args.expires}"] if args.expires else []
    if any(len(word.split()) != 1 or "#" in word for word in words):
        raise CommandError("a name, model or time holds a space or #, which a line of a key cannot; write it without.")
    line = line_of(parse_line(" ".join(words), "the command line"))
    if args.file is None:
        print(f"{key}\n{line}")
        return 0
    with open(os.open(args.file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+", encoding="utf-8") as file:
        before = file.read()
        added = f"{line}\n" if not before or before.endswith("\n") else f"\n{line}\n"
        parse_keys(before + added, args.file)  # the name is new, and the rest is sound
        file.write(added)
    print(key)
    print(f"added {args.api_key} to {args.file}; the key is not kept anywhere", file=sys.stderr)
    return 0
