"""What a method may decide about a round before it begins: what kind of round it is, and who takes part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perfed.core.errors import Problem

NUMBERS = ("loss", "seconds", "epochs")  # what may not be known of a client


@dataclass(frozen=True)
class Phase:
    """Say what kind of round comes next.

    Attributes:
        name: the clients' part is `local_<name>` where the method has it, else `local`; `context.phase` says it, too.
        everybody: all clients take part that have training samples, and `cohort_of` is not asked.
        exchanges: number of exchanges between server and clients.
        steps: local steps of a `descend` or `fold` that says neither epochs nor steps; None: those of `epochs` epochs.
        first: clients have, once, an exchange before all others, in the phase of this name: in their first round that
            asks for it. Whoever fails in it is not asked for more in that round. Empty: there is none.
    """

    name: str = ""
    everybody: bool = False
    exchanges: int = 1
    steps: int | None = None
    first: str = ""


@dataclass(frozen=True)
class Selection:
    """Say who takes part in a round, and how much of the work each of them is asked to do.

    Attributes:
        ids: the clients.
        epochs: local epochs of each, above 0 and at most those of the method; a part of an epoch is allowed.
        least: epochs that each does instead where it cannot finish those; who cannot finish these either is lost.
            None: each does what it can.
    """

    ids: Sequence[int]
    epochs: Sequence[float]
    least: Sequence[float] | None = None


class Known:
    """What a server may know of its clients when it chooses among them; it is saved with the run.

    Numbers about past rounds are brought from the device when they are asked for, and not before.

    Attributes:
        names: one for each client.
        sizes: training samples of each.
        able: the clients that have training samples, ascending: nobody else can take part.
        available: those of them that can be asked in the next round, ascending; all of them where a run does not say
            otherwise. Whoever else is chosen is not asked.
        draw: returns the cohort that takes part where a method does not choose: as large as the run says, a function of
            seed and round alone.
    """

    def __init__(self, names: Sequence[str], sizes: Sequence[int], able: Sequence[int]):
        """Begin without knowing anything of the past.

        Args:
            names: see above.
            sizes: see above.
            able: see above.
        """
        self.names, self.sizes, self.able, self.available = names, sizes, able, able
        self.draw: Callable[[], list[int]] = lambda: list(able)
        self.fetch: Callable[[], None] = lambda: None
        self.afford: Callable[[], Sequence[float] | None] = lambda: None
        count = len(names)
        self.table = {name: torch.zeros(count, dtype=torch.int32) for name in ("asked", "answered", "failed", "joined")}
        self.table |= {name: torch.full((count,), torch.nan, dtype=torch.float64) for name in NUMBERS}

    def _about(self, name: str) -> Tensor:
        self.fetch()
        return self.table[name]

    @property
    def asked(self) -> Tensor:
        """[clients], the last round in which each was asked; 0: never."""
        return self.table["asked"]

    @property
    def answered(self) -> Tensor:
        """[clients], the last round in which each sent something usable; 0: never."""
        return self._about("answered")

    @property
    def failed(self) -> Tensor:
        """[clients], how often each was asked in vain: it sent nothing, or nothing usable."""
        return self._about("failed")

    @property
    def loss(self) -> Tensor:
        """[clients], the last `Up.loss` of each; NaN: it never sent one."""
        return self._about("loss")

    @property
    def seconds(self) -> Tensor:
        """[clients], how long each one's last round took on the simulated clock; NaN: not known."""
        return self._about("seconds")

    @property
    def epochs(self) -> Tensor:
        """[clients], the epochs that each finished when it was last asked, 0 where it was lost; NaN: not known.

        It is known where a run or a method limits the work of clients.
        """
        return self._about("epochs")

    @property
    def affordable(self) -> Tensor:
        """[clients], the epochs that each can afford in the next round; infinity: any number."""
        most = self.afford()
        everything = torch.full((len(self.names),), torch.inf, dtype=torch.float64)
        return everything if most is None else torch.tensor(most, dtype=torch.float64)

    # ------------------------------------------------------------------ kept by a federation

    def ask(self, round: int, ids: Sequence[int]) -> None:
        """Note who is asked in a round."""
        self.table["asked"][list(ids)] = round

    def answer(self, round: int, ids: Sequence[int], usable: Sequence[bool], loss: Sequence[float] | None) -> None:
        """Note who sent something usable in an exchange, who did not, and which losses they reported."""
        good = [id for id, fine in zip(ids, usable, strict=True) if fine]
        self.table["answered"][good] = round
        self.fail([id for id, fine in zip(ids, usable, strict=True) if not fine])
        if loss is not None:
            reported = [value for value, fine in zip(loss, usable, strict=True) if fine]
            self.table["loss"][good] = torch.tensor(reported, dtype=torch.float64)

    def join(self, ids: Sequence[int]) -> None:
        """Note whose first exchange is done, in a round that counts."""
        if ids:
            self.table["joined"][list(ids)] = 1

    def fail(self, ids: Sequence[int]) -> None:
        """Note who sent nothing usable."""
        if ids:
            self.table["failed"][list(ids)] += 1

    def note(self, name: str, numbers: Mapping[int, float]) -> None:
        """Note numbers about clients that took part, as one of the table's columns."""
        self.table[name][list(numbers)] = torch.tensor(list(numbers.values()), dtype=torch.float64)

    def save(self) -> dict[str, Tensor]:
        """Return for a checkpoint what is known of the past."""
        self.fetch()
        return {name: numbers.clone() for name, numbers in self.table.items() if not numbers.isnan().all()}

    def restore(self, table: dict[str, Tensor]) -> None:
        """Take over what `save` returned; a Problem where it is of other clients."""
        for name, numbers in table.items():
            now = self.table.get(name)
            if now is None or numbers.shape != now.shape or numbers.dtype != now.dtype:
                raise Problem(f"what is known of the clients has no '{name}' for {len(self.names)} of them")
            self.table[name] = numbers.clone()


@dataclass(frozen=True)
class Chosen:
    """Hold who takes part in a round.

    Attributes:
        exchanges: the clients of each exchange, ascending.
        epochs: local epochs of each client; None: those of the method.
        least: epochs that each does instead, see `Selection`; None: there are none.
    """

    exchanges: list[list[int]]
    epochs: dict[int, float] | None = None
    least: dict[int, float] | None = None

    @property
    def ids(self) -> list[int]:
        """Return everybody who takes part, ascending."""
        return sorted({id for ids in self.exchanges for id in ids})


def chosen(choice: Any, exchanges: int, known: Known, method: str, most: int) -> Chosen:
    """Return what `cohort_of` returned in one form, or refuse it in a sentence; who is not available drops out.

    Args:
        choice: clients, a list of clients for each exchange, or a `Selection`.
        exchanges: number of exchanges in the round.
        known: the clients there are.
        method: the method's name.
        most: its epochs.
    """
    epochs = least = None
    if isinstance(choice, Selection):
        ids = _numbers(choice.ids)
        epochs = _epochs(ids, choice.epochs, method, most)
        least = None if choice.least is None else _epochs(ids, choice.least, method, most)
        choice = choice.ids
    if not any(isinstance(part, list | tuple) for part in choice):
        return Chosen([_clients(choice, known, method)] * exchanges, epochs, least)
    if len(choice) != exchanges:
        raise Problem(f"{method}.cohort_of returns clients for {len(choice)} exchanges, but the round has {exchanges}")
    return Chosen([_clients(part, known, method) for part in choice], epochs, least)


def _numbers(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, Tensor) else list(values)


def _epochs(ids: list[int], parts: Any, method: str, most: int) -> dict[int, float]:
    """Return the epochs of each client; refuse what is none."""
    parts = _numbers(parts)
    if len(ids) != len(parts):
        raise Problem(f"{method}.cohort_of selects {len(ids)} clients with {len(parts)} epochs")
    for id, part in zip(ids, parts, strict=True):
        if not 0 < part <= most:  # also where it is NaN
            raise Problem(f"{method}.cohort_of asks client {id} for {part:g} epochs: above 0, and at most {most}")
    return dict(zip(ids, map(float, parts), strict=True))


def _clients(ids: Any, known: Known, method: str) -> list[int]:
    """Return clients in ascending order, each once, that have something to do and can be asked."""
    count, ids = len(known.names), _numbers(ids)
    if not all(isinstance(id, int) and not isinstance(id, bool) for id in ids):
        raise Problem(f"{method}.cohort_of must return clients as a list of whole numbers, not {ids}")
    numbers = {*ids}
    if wrong := [id for id in numbers if not 0 <= id < count]:
        raise Problem(f"{method}.cohort_of returns client {wrong[0]}; there are clients 0 to {count - 1}")
    there = numbers if known.available is known.able else numbers & {*known.available}
    return sorted(id for id in there if known.sizes[id])
