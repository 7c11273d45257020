"""What a method may decide about a round before it begins: what kind of round it is, and who takes part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perfed.core.errors import Problem


@dataclass(frozen=True)
class Phase:
    """Say what kind of round comes next.

    Attributes:
        name: the clients' part is `local_<name>` where the method has it, else `local`; `context.phase` says it, too.
        everybody: all clients take part that have training samples, and `cohort_of` is not asked.
        exchanges: number of exchanges between server and clients.
        steps: local steps of a `descend` or `fold` that says neither epochs nor steps; None: those of `epochs` epochs.
        first: who takes part for the first time has an exchange before all others, in the phase of this name; empty:
            there is none.
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
    """

    ids: Sequence[int]
    epochs: Sequence[float]


class Known:
    """What a server may know of its clients when it chooses among them; it is saved with the run.

    Numbers about past rounds are brought from the device when they are asked for, and not before.

    Attributes:
        names: one for each client.
        sizes: training samples of each.
        able: the clients that have training samples, ascending: nobody else can take part.
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
        self.names, self.sizes, self.able = names, sizes, able
        self.draw: Callable[[], list[int]] = lambda: list(able)
        self.fetch: Callable[[], None] = lambda: None
        count = len(names)
        self.table = {name: torch.zeros(count, dtype=torch.int32) for name in ("asked", "answered", "failed")}
        self.table |= {name: torch.full((count,), torch.nan, dtype=torch.float64) for name in ("loss", "seconds")}

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

    def fail(self, ids: Sequence[int]) -> None:
        """Note who sent nothing usable."""
        self.table["failed"][list(ids)] += 1

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
    """

    exchanges: list[list[int]]
    epochs: dict[int, float] | None = None

    @property
    def ids(self) -> list[int]:
        """Return everybody who takes part, ascending."""
        return sorted({id for ids in self.exchanges for id in ids})


def chosen(choice: Any, exchanges: int, known: Known, method: str) -> Chosen:
    """Return what `cohort_of` returned in one form, or refuse it in a sentence; clients without samples drop out.

    Args:
        choice: clients, a list of clients for each exchange, or a `Selection`.
        exchanges: number of exchanges in the round.
        known: the clients there are.
        method: the method's name.
    """
    epochs = None
    if isinstance(choice, Selection):
        if len(choice.ids) != len(choice.epochs):
            raise Problem(f"{method}.cohort_of selects {len(choice.ids)} clients with {len(choice.epochs)} epochs")
        epochs = {int(id): float(part) for id, part in zip(choice.ids, choice.epochs, strict=True)}
        choice = choice.ids
    if not any(isinstance(part, list | tuple) for part in choice):
        return Chosen([_clients(choice, known, method)] * exchanges, epochs)
    if len(choice) != exchanges:
        raise Problem(f"{method}.cohort_of returns clients for {len(choice)} exchanges, but the round has {exchanges}")
    return Chosen([_clients(part, known, method) for part in choice], epochs)


def _clients(ids: Any, known: Known, method: str) -> list[int]:
    """Return clients in ascending order, each once; those without training samples have nothing to do."""
    count = len(known.names)
    ids = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    if not all(isinstance(id, int) and not isinstance(id, bool) for id in ids):
        raise Problem(f"{method}.cohort_of must return clients as a list of whole numbers, not {ids}")
    numbers = {*ids}
    if wrong := [id for id in numbers if not 0 <= id < count]:
        raise Problem(f"{method}.cohort_of returns client {wrong[0]}; there are clients 0 to {count - 1}")
    return sorted(id for id in numbers if known.sizes[id])
