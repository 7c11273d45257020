"""Identity: uploads travel as they are."""

from __future__ import annotations

from perfed.wire.base import Transform


class Identity(Transform):
    """Send every upload as it is."""
