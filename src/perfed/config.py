"""What a run is: dataclasses, read from TOML and from the command line, checked before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from perfed.core.fields import checked, hyper


@dataclass(frozen=True)
class DataConfig:
    """Where the clients' samples come from."""

    name: str = hyper("digits", "data set: see `perfed list datasets`; 'folder' for your own files")
    dir: str | None = hyper(None, "folder with data files (default: $PERFED_DATA, then ~/.cache/perfed)")
    partition: str = hyper("", "how one data set becomes clients (default: natural if it has clients, else dirichlet)")
    clients: int = hyper(20, "number of clients (natural partition: at most this many; 0 is all)", at_least=0)
    alpha: float = hyper(0.3, "Dirichlet concentration: small is uneven", above=0)
    classes_per_client: int = hyper(2, "classes each client holds in the partition 'classes'", at_least=1)
    min_samples: int = hyper(10, "fewest samples a client may get from the Dirichlet partition", at_least=3)
    test: float = hyper(0.25, "share of a client's samples kept for testing", above=0, below=1)
    val: float = hyper(0.1, "share of a client's samples kept for validation", at_least=0, below=1)
    client_column: str = hyper("client", "column that names the client, in one table for all clients")
    label_column: str = hyper("label", "column that holds the label, in CSV files")
    synthetic_a: float = hyper(0.5, "Synthetic(a, b): how much the clients' true models differ", at_least=0)
    synthetic_b: float = hyper(0.5, "Synthetic(a, b): how much the clients' inputs differ", at_least=0)

    def __post_init__(self) -> None:
        checked(self, "data")


@dataclass(frozen=True)
class ModelConfig:
    """The network every client trains."""

    name: str = hyper("", "network: see `perfed list models`, or path.py:factory (default: what suits the data)")
    head: str = hyper("", "module that is the head (default: the last one with parameters)")
    hidden: int = hyper(64, "width of the hidden layer of 'mlp'", at_least=1)
    norm: Literal["batch", "group"] = hyper("group", "normalisation of 'resnet'")

    def __post_init__(self) -> None:
        checked(self, "model")
