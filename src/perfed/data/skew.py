"""Skews on top of a partition: turned or noisy images, labels that groups of clients use differently.

They are drawn per client from the partition's seed and treat a client's training, validation and test samples alike.
Clients count as they were dealt, so another order of clients changes nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from perfed.core.errors import Problem
from perfed.data.config import DataConfig

_ROTATE, _RELABEL, _ROWS, _NOISE = 4, 5, 6, 7  # random streams


@dataclass(frozen=True)
class Skews:
    """The changes to each client's samples; None where there is none.

    Attributes:
        seed: what everything drawn here follows from.
        degrees: [clients], how far images are turned.
        level: [clients], the deviation of the noise.
        group: [clients], which of the maps.
        maps: [groups, classes], the new name of each label.
        share: the share of samples that are renamed.
    """

    seed: int
    degrees: np.ndarray | None = None
    level: np.ndarray | None = None
    group: np.ndarray | None = None
    maps: np.ndarray | None = None
    share: float = 0.0

    @property
    def kinds(self) -> list[np.ndarray]:
        """What puts clients into groups, each [clients]; nothing where no skew does."""
        return [kind for kind in (self.group, self.degrees) if kind is not None]

    def labels(self, y: np.ndarray, client: int, part: int) -> np.ndarray:
        """Return a client's labels in one part, as it uses them."""
        if self.group is None or self.maps is None:
            return y
        rng = np.random.default_rng([self.seed, _ROWS, client, part])
        renamed = rng.permutation(len(y))[: int(len(y) * self.share + 0.5)]
        y = y.copy()
        y[renamed] = self.maps[self.group[client]][y[renamed]]
        return y

    def features(self, x: np.ndarray, client: int, part: int) -> np.ndarray:
        """Return a client's samples in one part, as it sees them."""
        if self.degrees is not None:
            x = np.rot90(x, int(self.degrees[client]) // 90, axes=(2, 3))
        if self.level is None:
            return x
        rng = np.random.default_rng([self.seed, _NOISE, client, part])
        noise = rng.standard_normal(x.shape, dtype=np.float32) * np.float32(self.level[client])
        if x.dtype != np.uint8:
            return x + noise
        return np.clip(np.rint(x + 255 * noise), 0, 255).astype(np.uint8)  # bytes stay bytes

    def about(self, places: np.ndarray) -> dict[str, Any]:
        """Return the skews as plain values for a file, with the clients in this order."""
        plain: dict[str, Any] = {}
        if self.degrees is not None:
            plain["rotate"] = self.degrees[places].tolist()
        if self.level is not None:
            plain["noise"] = [round(level, 9) for level in self.level[places].tolist()]
        if self.group is not None and self.maps is not None:
            plain["relabel"] = {"share": self.share, "groups": self.group[places].tolist(), "maps": self.maps.tolist()}
        return plain


def refuse_unfit(config: DataConfig, task: str) -> None:
    """Refuse skews that a task cannot have."""
    if config.relabel and task != "classification":
        raise Problem(f"data.relabel renames classes, and the task of '{config.name}' is {task}: leave it out")
    if config.noise and task == "next_token":
        raise Problem(f"data.noise adds noise to numbers, and the samples of '{config.name}' are tokens: leave it out")


def draw(config: DataConfig, clients: int, classes: int, sample: tuple[int, ...], seed: int) -> Skews:
    """Draw the skews that a configuration asks for; each has a random stream of its own.

    Args:
        config: the skews.
        clients: how many clients there are.
        classes: how many classes there are.
        sample: the shape of a sample.
        seed: what everything drawn here follows from.

    Returns:
        What happens to each client's samples.
    """
    degrees, level, group, maps = None, None, None, None
    if angles := config.angles():
        if len(sample) != 3:
            raise Problem(
                f"data.rotate needs images [channels, height, width], but '{config.name}' has samples {sample}"
            )
        if sample[1] != sample[2] and any(angle % 180 for angle in angles):
            raise Problem(f"data.rotate can turn images of {sample[1]}x{sample[2]} by 0 and 180 degrees only")
        degrees = np.array(angles)[_groups(clients, len(angles), "data.rotate", [seed, _ROTATE])]
    if config.noise:
        level = config.noise * np.arange(1, clients + 1) / clients
    if config.relabel:
        count = config.relabel_groups
        group = _groups(clients, count, "data.relabel_groups", [seed, _RELABEL, 0]) if count else np.arange(clients)
        maps = _maps(config, clients, classes, np.random.default_rng([seed, _RELABEL, 1]))
    return Skews(seed, degrees, level, group, maps, config.relabel)


def _groups(clients: int, count: int, setting: str, key: list[int]) -> np.ndarray:
    """Draw a group for each client; sizes differ by one at most."""
    if count > clients:
        raise Problem(f"{setting} makes {count} groups, but there are only {clients} clients")
    return np.random.default_rng(key).permutation(np.arange(clients) % count)


def _maps(config: DataConfig, clients: int, classes: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the new name of every label for each group, [groups, classes]."""
    groups = config.relabel_groups  # each has names of its own, but clients that go by themselves may have equal ones
    count = groups or clients
    if config.relabel_by == "permutation":
        return np.stack([rng.permutation(classes) for _ in range(count)])
    names = np.arange(classes)
    if config.relabel_by == "shift":
        maps = (names + config.relabel_shift * np.arange(count)[:, None]) % classes
        if (different := len(np.unique(maps[:, 0]))) < (groups or 2):
            raise Problem(
                f"data.relabel_shift is {config.relabel_shift}, which renames {classes} labels in only {different} "
                f"ways, but data.relabel_groups makes {count} groups: change one of them"
            )
        return maps
    if 2 * groups > classes or classes < 2:
        raise Problem(f"data.relabel_groups is {groups}, but {classes} labels make only {classes // 2} pairs to swap")
    if groups:
        pairs = rng.permutation(classes)[: 2 * groups].reshape(groups, 2)
    else:
        pairs = np.stack([rng.choice(classes, 2, replace=False) for _ in range(clients)])
    maps = np.tile(names, (count, 1))
    for renamed, pair in zip(maps, pairs, strict=True):
        renamed[pair] = renamed[pair[::-1]]
    return maps
