"""The file that `perfed new` writes: a whole method in fifteen lines, to be changed."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from perfed.core.errors import Problem

TEMPLATE = '''"""{title}: FedAvg whose clients keep a share of their own last model.

Say here what the method does, which paper it is from, and how this file differs from the paper.
"""

from dataclasses import dataclass

from perfed import Down, Method, Up, hyper


@dataclass(frozen=True)
class {title}(Method):
    share: float = hyper(0.5, "share of the client's own model in its start; 0 is FedAvg", at_least=0, at_most=1)

    evaluates = "own"  # what `personalise` returns: own, assembled, adapted or global

    def init_server(self, clients):  # what the server knows before round 1
        return self.model.init(self.context.seed)

    def init_client(self):  # what a client knows before its first round; it never leaves the client
        return self.model.init(self.context.seed)

    def broadcast(self, server, ids):  # what goes to the clients of a round
        return Down(shared=server)

    def local(self, client, down, data):  # ONE client's round; no `if` on tensors: it runs for many clients at once
        w = down.shared
        theta = self.descend(self.share * client + (1 - self.share) * w, data)
        return theta, Up(mean=theta - w)

    def aggregate(self, server, cohort):  # the server sees the weighted mean of what clients put into `mean`
        return server + cohort.mean

    def personalise(self, client, down, data):  # the model this client predicts with
        return client
'''


def write_method(name: str) -> Path:
    """Write the template as NAME.py in the current folder; a file that exists is not overwritten.

    Args:
        name: the method's name, with or without `.py`.

    Returns:
        The file.
    """
    stem = name.removesuffix(".py")
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,40}", stem) or keyword.iskeyword(stem):
        raise Problem(f"'{name}' is no name for a method: lower-case letters, digits and _, starting with a letter")
    path = Path(f"{stem}.py")
    if path.exists():
        raise Problem(f"'{path}' exists already")
    title = "".join(part.capitalize() for part in stem.split("_"))
    path.write_text(TEMPLATE.format(title=title), encoding="utf-8")
    return path
