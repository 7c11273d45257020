"""The settings of the section `data`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from perfed.core.errors import Problem
from perfed.core.fields import checked, hyper


@dataclass(frozen=True)
class DataConfig:
    """Say where the clients' samples come from and how they become clients."""

    name: str = hyper("digits", "data set: see `perfed list datasets`; 'folder' for your own files")
    dir: str | None = hyper(None, "folder with data files (default: $PERFED_DATA, then ~/.cache/perfed)")
    samples: int = hyper(
        0, "most samples of the data set, drawn class by class in equal shares where it has classes; 0: all", at_least=0
    )
    scenario: str = hyper("", "a set of data settings with a name, others go before them: see `perfed list scenarios`")
    partition: str = hyper("", "how one data set becomes clients (default: natural if it has clients, else dirichlet)")
    clients: int = hyper(20, "number of clients (natural partition: at most this many; 0 is all)", at_least=0)
    alpha: float = hyper(0.3, "Dirichlet concentration: small is uneven", above=0)
    cap: bool = hyper(True, "Dirichlet: a client that holds its even part of all samples gets no more")
    classes_per_client: int = hyper(2, "classes each client holds: 'classes', 'uneven', 'pairs', 'ring'", at_least=1)
    share_low: float = hyper(0.3, "'uneven': a client's weight in a class is drawn from U(low, high)", above=0)
    share_high: float = hyper(0.7, "'uneven': the upper end of that range", above=0)
    power_law: float = hyper(1.2, "'powerlaw': sizes in proportion to rank^-a", at_least=0, at_most=20)
    log_sigma: float = hyper(2.0, "'lognormal': sizes in proportion to LogN(0, sigma)", at_least=0, at_most=20)
    min_samples: int = hyper(
        10, "fewest samples of a client: 'dirichlet', 'powerlaw', 'lognormal', 'domains', 'shakespeare'", at_least=3
    )
    partition_seed: int | None = hyper(None, "seed of the partition (default: run.seed)", at_least=0, at_most=2**31)
    split: Literal["client", "official"] = hyper("client", "split each client's samples, or keep the official test set")
    test: float = hyper(0.25, "share of a client's samples kept for testing", above=0, below=1)
    val: float = hyper(
        0.1, "share kept for validation: of a client's samples, or of official training", at_least=0, below=1
    )
    bins: int = hyper(10, "regression: bins by quantiles that stand for classes where samples are dealt", at_least=2)
    stratify: bool = hyper(True, "give every class the same shares in training, validation and test")
    normalise: Literal["auto", "federated", "local", "channel", "half", "none"] = hyper(
        "auto", "tables: federated, local, none; images: channel, half, none, federated (auto: see docs/data.md)"
    )
    public: float = hyper(
        0.0, "samples held out before the partition, for the server: a share below 1, or how many", at_least=0
    )
    public_data: str = hyper("", "data set, or folder, that these samples are from in place of the clients' own")
    rotate: str = hyper("", "feature skew: turn images by these degrees, one per group of clients: 0,90,180,270")
    noise: float = hyper(0.0, "feature skew: client i of N gets Gaussian noise of deviation noise * i / N", at_least=0)
    relabel: float = hyper(0.0, "preference skew: share of samples whose labels a group renames", at_least=0, at_most=1)
    relabel_by: Literal["permutation", "swap", "shift"] = hyper(
        "permutation", "how a group renames: all labels, two labels of its own, or each label by so many classes"
    )
    relabel_shift: int = hyper(3, "'shift': group g, from 0, calls class y what is y + g times this", at_least=1)
    relabel_groups: int = hyper(2, "groups of clients that rename alike; 0: each client by itself", at_least=0)
    team_order: Literal["dealt", "random", "labels", "groups"] = hyper(
        "dealt", "who stand side by side, and so form teams, edges, or clusters that are known"
    )
    client_column: str = hyper(
        "client", "column that names the client, in one table for all clients; '' is none: the file is one client"
    )
    label_column: str = hyper("label", "column that holds the label, in CSV files; several labels: a,b,c")
    task: Literal["auto", "classification", "binary", "multilabel", "regression", "next_token"] = hyper(
        "auto", "own files: what is to be told of a sample (auto: see docs/data.md)"
    )
    labels: str = hyper("", "own files: what labels are called in place of what is written: yes=1,no=0")
    channels: Literal["auto", "first", "last"] = hyper(
        "auto", "own files: where images have their channels: [n, channels, h, w] or [n, h, w, channels]"
    )
    sequence: int = hyper(80, "'shakespeare': characters of a sample", at_least=1, at_most=10_000)
    synthetic_a: float = hyper(0.5, "Synthetic(a, b): how much the clients' true models differ", at_least=0)
    synthetic_b: float = hyper(0.5, "Synthetic(a, b): how much the clients' inputs differ", at_least=0)
    synthetic_samples: int = hyper(0, "synthetic data: samples of every client (0: sizes differ)", at_least=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "task", str(self.task).replace("-", "_"))  # next-token for next_token
        checked(self, "data")
        for name in ("name", "scenario", "partition"):  # two_words for two-words
            object.__setattr__(self, name, getattr(self, name).replace("_", "-"))

        if self.public > 1 and self.public != int(self.public):
            raise Problem(f"data.public is a share below 1 or a whole number of samples, not {self.public:g}")

    def label_columns(self, header: Sequence[str] = ()) -> list[str]:
        """Return the columns that `label_column` names: one of them, where a header has it, or several, a,b,c."""
        several = [] if self.label_column in header else [name.strip() for name in self.label_column.split(",")]
        return several if len(several) > 1 else [self.label_column]

    def renames(self) -> dict[str, str]:
        """Return what `labels` says each label is called; anything but pairs old=new is a Problem."""
        pairs = [pair.partition("=") for pair in self.labels.split(",")] if self.labels.strip() else []
        names = {old.strip(): new.strip() for old, equals, new in pairs if equals}
        if len(names) < len(pairs) or not all(names) or not all(names.values()):
            raise Problem(f"data.labels takes old=new with commas between, as yes=1,no=0, not '{self.labels}'")
        return names

    def angles(self) -> list[int]:
        """Return the whole degrees of `rotate`; anything but multiples of 90 is a Problem."""
        words = self.rotate.split(",") if self.rotate.strip() else []
        with suppress(ValueError):
            degrees = [int(word) for word in words]
            if not any(angle % 90 for angle in degrees):
                return degrees
        raise Problem(f"data.rotate takes multiples of 90 with commas between, as 0,90,180,270, not '{self.rotate}'")
