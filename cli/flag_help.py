"""``--help`` of a command with a hundred flags: the most used are explained and all are named, in groups.

``--help=all`` explains all, ``--help=GROUP`` a group's (``--help=listgroup`` has their names), ``--help=FLAG`` one,
``--help=WORD`` those that speak of it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from typing import Any

from ..proto.flag_parser import nearest


def add_help(parser: argparse.ArgumentParser, most_used: tuple[str, ...]) -> None:
    """Give a parser made with ``add_help=False`` this help. ``most_used``: the flags that ``--help`` explains."""
    parser.add_argument(
        "-h", "--help", nargs="?", action=_Help, most_used=most_used, default=argparse.SUPPRESS,
        metavar="all|GROUP|FLAG|WORD", help="show this, all flags, a group, a flag, or those that speak of a word",
    )  # fmt: skip


class _Help(argparse.Action):
    def __init__(self, option_strings: Any, dest: str, most_used: tuple[str, ...], **options: Any):
        super().__init__(option_strings, dest, **options)
        self._most_used = most_used

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        groups = {
            str(group.title): shown for group in parser._action_groups
            if (shown := [each for each in group._group_actions if each.help != argparse.SUPPRESS])
            and group.title != "positional arguments"
        }  # fmt: skip
        text = _short(parser, groups, self._most_used) if values is None else _about(parser, groups, values)
        parser._print_message(text, sys.stdout)
        parser.exit()


def _usage(parser: argparse.ArgumentParser) -> str:
    return f"usage: {parser.prog} [MODEL] [--FLAG VALUE ...]\n"


def _short(parser: argparse.ArgumentParser, groups: dict[str, list[Any]], most_used: tuple[str, ...]) -> str:
    """Usage, the flags that are most used, and the names of all."""
    actions = [each for name in most_used for each in [parser._option_string_actions[name]]]
    lines = [_usage(parser), f"{parser.description}\n" if parser.description else "", _explained("most used", actions)]
    lines.append("all, in groups:")
    width = min(shutil.get_terminal_size().columns, 110) - 2
    for title, members in groups.items():
        if names := ", ".join(_name(each) for each in members if _is_flag(each)):
            wrapped = textwrap.fill(
                names, width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
            )
            lines.append(f"  {title}\n{wrapped}")
    ways = ("all", "GROUP", "FLAG", "WORD")
    lines.append(
        "\n" + ", ".join(f"--help={way}" for way in ways) + " explain them; flags of vLLM that are not listed:"
    )
    lines.append("docs/flags.md says of each whether it is taken without effect, or what to use in its place.\n")
    return "\n".join(line for line in lines if line)


def _is_flag(action: argparse.Action) -> bool:
    return bool(action.option_strings) and not isinstance(action, _Help)


def _name(action: argparse.Action) -> str:
    return next(each for each in reversed(action.option_strings) if not each.startswith("--no-"))


def _about(parser: argparse.ArgumentParser, groups: dict[str, list[Any]], topic: str) -> str:
    """All flags, those of a group, one, or those whose name or help has a word."""
    wanted = topic.lower().replace("_", "-").lstrip("-")
    if wanted == "listgroup":
        return "".join(f"{title}\n" for title in groups)
    if wanted == "all":
        found = groups
    elif found := {title: members for title, members in groups.items() if title.lower() == topic.lower()}:
        pass
    elif (one := parser._option_string_actions.get(f"--{wanted}")) is not None and one.help != argparse.SUPPRESS:
        found = {"": [one]}
    else:
        found = {
            title: said for title, members in groups.items()
            if (said := [each for each in members if wanted in f"{each.option_strings} {each.help}".lower()])
        }  # fmt: skip
    if not found:
        hint = nearest(f"--{wanted}", parser._option_string_actions)
        return f"no group, flag or help has {topic!r:.80}{hint}; the groups are {', '.join(groups)}.\n"
    return "\n".join([_usage(parser), *(_explained(title or "flag", members) for title, members in found.items())])


def _explained(title: str, actions: list[Any]) -> str:
    """argparse's own lines of some flags."""
    formatter = argparse.HelpFormatter("", max_help_position=30)
    formatter.start_section(title)
    formatter.add_arguments(actions)
    formatter.end_section()
    return formatter.format_help()
