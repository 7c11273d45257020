"""Words from outside, such as names of clients and folders, made fit to be shown."""

from __future__ import annotations

import unicodedata

JOINERS = "\u200c\u200d"  # invisible, but parts of words in Persian and Hindi


def visible(text: str) -> str:
    r"""Return text with every character written out that a terminal would obey, or that nobody would see.

    >>> visible("a\x1b[31m\u202eb")
    'a\\x1b[31m\\u202eb'
    """
    return text if text.isprintable() else "".join(char if _is_harmless(char) else _escape(char) for char in text)


def _is_harmless(char: str) -> bool:
    return char.isprintable() or char in "\n\t" or char in JOINERS or unicodedata.category(char) == "Zs"


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
