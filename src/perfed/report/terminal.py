"""The place for words for people: what stands in them is shown, and never obeyed."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from perfed.core.words import visible


class Terminal(Console):
    """Show text as it is: brackets are no markup, colons no emoji, and escapes of a terminal are written out."""

    def __init__(self, **options: Any):
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        """Return text as rich draws it.

        Args:
            text: the text.
            options: those of rich.
        """
        return super().render_str(visible(text), **options)
