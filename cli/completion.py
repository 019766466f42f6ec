"""``quire completion bash|zsh|fish``: a script that has a shell complete commands, flags and their values.

It is made from the parsers themselves."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SHELLS = ("bash", "zsh", "fish")


@dataclass
class Words:
    """What may follow a command: ``actions`` are commands of its own, ``flags`` have their help and their choices."""

    help: str = ""
    actions: dict[str, str] = field(default_factory=dict)
    flags: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)


def add_parser(subparsers: Any) -> None:
    """The command's argument."""
    parser = subparsers.add_parser("completion")
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    parser.set_defaults(run=completion)


def completion(args: argparse.Namespace) -> int:
    """Print the script."""
    from .main import COMMANDS, make_parser

    commands = {}
    for name, (_, help) in COMMANDS.items():
        commands[name] = Words(help)
        _read(_command(make_parser(name), name), commands[name])
    print(_WRITERS[args.shell](commands), end="")
    return 0


def _command(parser: argparse.ArgumentParser, name: str) -> argparse.ArgumentParser:
    """The parser of a command among those of another."""
    return next(each.choices[name] for each in parser._actions if isinstance(each, argparse._SubParsersAction))


def _read(parser: argparse.ArgumentParser, words: Words) -> None:
    """Add what a parser takes, and the commands beneath it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {each.dest: each.help or "" for each in action._choices_actions}
            for name, inner in action.choices.items():
                words.actions[name] = helps.get(name, "")
                _read(inner, words)
        elif not action.option_strings and action.choices:
            words.actions.update((str(each), "") for each in action.choices)
        elif action.help != argparse.SUPPRESS:
            choices = tuple(map(str, action.choices or ()))
            for flag in action.option_strings:
                if flag.startswith("--"):
                    words.flags[flag] = (_plain(action), choices)


def _plain(action: argparse.Action) -> str:
    """A flag's help without what would mean something to a shell."""
    text = " ".join((action.help or "").replace("%%", "%").split())
    return "".join(each for each in text if each not in "'\"`$\\[]")[:70]


def _bash(commands: dict[str, Words]) -> str:
    cases, values = [], []
    for name, words in commands.items():
        cases.append(f"    {name}) words='{' '.join([*words.actions, *words.flags])}' ;;")
        for flag, (_, choices) in words.flags.items():
            if choices:
                values.append(f"    {name}:{flag}) words='{' '.join(choices)}' ;;")
    return _BASH.format(commands=" ".join(commands), cases="\n".join(cases), values="\n".join(values))


_BASH = """# quire completion bash; put it where your shell reads: source <(quire completion bash)
_quire() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=''
  if [ "$before" = '=' ]; then before=${{COMP_WORDS[COMP_CWORD-2]}}; fi
  if [ "$word" = '=' ]; then before=${{COMP_WORDS[COMP_CWORD-1]}}; word=''; fi
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W '{commands} --help --version' -- "$word"))
    return
  fi
  case "${{COMP_WORDS[1]}}:$before" in
{values}
  esac
  if [ -n "$words" ]; then
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    return
  fi
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _quire quire
"""


def _zsh(commands: dict[str, Words]) -> str:
    head = "# quire completion zsh; put it where your shell reads: source <(quire completion zsh)\n"
    return (
        head
        + "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
        + (_bash(commands).split("\n", 1)[1])
    )


def _fish(commands: dict[str, Words]) -> str:
    lines = ["# quire completion fish; put it where your shell reads: quire completion fish | source"]
    for name, words in commands.items():
        help = words.help.replace("'", "")
        lines.append(f"complete -c quire -f -n __fish_use_subcommand -a {name} -d '{help}'")
        inside = f"complete -c quire -n '__fish_seen_subcommand_from {name}'"
        lines += [f"{inside} -f -a {action}" for action in words.actions]
        for flag, (help, choices) in words.flags.items():
            taken = f" -x -a '{' '.join(choices)}'" if choices else ""
            lines.append(f"{inside} -l {flag[2:]}{taken} -d '{help}'")
    return "\n".join([*lines, ""])


_WRITERS: dict[str, Callable[[dict[str, Words]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
