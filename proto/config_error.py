"""The error of a flag or a file that cannot work."""

from __future__ import annotations

from .log_lines import printable

_MOST_SAID = 2000


class ConfigError(ValueError):
    """A flag, a config file or a combination of them that cannot work. One line: value, limit, remedy.

    What it tells of may be a stranger's file: characters that cannot be printed are escaped, and of a text of more than
    ``_MOST_SAID`` characters the middle is left out.
    """

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) > _MOST_SAID:
            text = f"{text[: _MOST_SAID // 2]} … {text[-_MOST_SAID // 2 :]}"
        return printable(text)


def together(texts: list[str]) -> str:
    """Several errors as one line, each with its number; one error as it is."""
    if len(texts) == 1:
        return texts[0]
    return f"{len(texts)} errors: " + " ".join(f"({at}) {text.rstrip('.')}." for at, text in enumerate(texts, 1))
