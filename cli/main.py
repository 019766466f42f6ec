"""``quire``: find the command, import its module alone, run it. Errors are one line and a non-zero exit code."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import Any, NoReturn

from ..proto.config import ConfigError, FlagParser
from ..proto.flag_parser import nearest
from ..proto.foreign_flags import COMMANDS as HINTS
from ..proto.process import EXIT_CONFIG, complain
from ..proto.version import __version__
from .errors import CommandError

COMMANDS = {
    "serve": (".serve", "start a server: the OpenAI API on http://localhost:8000"),
    "chat": (".chat", "talk to a running server"),
    "complete": (".chat", "let a running server continue a text"),
    "top": (".top", "watch a running server in a terminal"),
    "run-batch": (".run_batch", "answer a file of requests, and end"),
    "bench": (".bench", "measure: serve, sweep, throughput, latency, control-plane"),
    "workers": (".workers", "list the workers of a running server, drain one, remove one"),
    "restart": (".restart", "replace the processes of a running server one by one, and lose no request"),
    "replay": (".replay", "run a flight recording again, and show what the scheduler did"),
    "quantize": (".quantize", "make a quantized checkpoint of a float model"),
    "fit": (".fit", "how much memory a model needs, and how fast it could be, of its config.json"),
    "doctor": (".doctor", "say what is installed, what this machine has, and what would stop a server"),
    "completion": (".completion", "print a script with which a shell completes commands and flags"),
    "keygen": (".keygen", "make the key file that processes on several machines share"),
}


def main(argv: list[str] | None = None) -> NoReturn:
    """The console script."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: list[str]) -> int:
    """Run a command line; its exit code."""
    try:
        parser = make_parser(argv[0] if argv and argv[0] in COMMANDS else None)
        if argv and argv[0] not in COMMANDS and not argv[0].startswith("-"):
            said = f": {HINTS[argv[0]]}" if argv[0] in HINTS else nearest(argv[0], COMMANDS)
            parser.error(f"there is no command {argv[0]!r:.80}{said}")
        flags = ("-h", "--help", "--version")
        if argv and argv[0].startswith("-") and argv[0] not in flags:
            parser.error(
                f"there is no flag {argv[0].partition('=')[0]!r:.80} before a command{nearest(argv[0], flags)}"
            )
        if argv[:1] == ["serve"]:
            from .flag_file import with_config_file

            argv = with_config_file(argv)
        args = parser.parse_args(argv)
        if args.command is None:
            parser.print_help()
            return 2
        return args.run(args) or 0
    except (CommandError, ConfigError) as error:
        complain("quire: error", error)
        return error.code if isinstance(error, CommandError) else EXIT_CONFIG
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has left; nobody is there to be told
        return 1


def make_parser(command: str | None) -> argparse.ArgumentParser:
    """The parser, with the flags of ``command`` only; None names the commands and no flags."""
    parser = FlagParser(prog="quire", description="A server for large language models.")
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, (module, help) in COMMANDS.items():
        if name == command:
            only: Any = _Only(commands, name, help)
            import_module(module, __package__).add_parser(only)
        elif command is None:
            commands.add_parser(name, help=help)
    return parser


class _Only:
    """Subparsers that take one command: a module may offer several."""

    def __init__(self, commands: Any, name: str, help: str):
        self._commands, self._name, self._help = commands, name, help

    def add_parser(self, name: str, **options: Any) -> argparse.ArgumentParser:
        if name != self._name:
            return argparse.ArgumentParser(prog=f"quire {name}", add_help=False)
        options.setdefault("help", self._help)
        options.setdefault("description", options["help"][:1].upper() + options["help"][1:] + ".")
        return self._commands.add_parser(name, **options)


if __name__ == "__main__":
    sys.exit(main())
