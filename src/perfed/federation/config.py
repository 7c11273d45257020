"""The section `system` of a configuration: how fast clients are, how they are connected, and when they can be asked."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from perfed.core.errors import Problem
from perfed.core.fields import checked, hyper

# Settings that have no effect unless another is above 0.
BELONGS = {
    "speed_spread": "speed",
    "jitter": "speed",
    "bandwidth_spread": "bandwidth",
    "affordable_min": "affordable_max",
    "affordable_spread": "affordable_max",
}


@dataclass(frozen=True)
class SystemConfig:
    """Say what is simulated of the machines that clients are, beside those that fail; by default nothing is."""

    speed: float = hyper(
        0.0, "training samples that a client gets through in a simulated second (0: at no time)", at_least=0
    )
    speed_spread: float = hyper(
        0.0, "how much clients differ in speed: deviation of its logarithm", at_least=0, at_most=10
    )
    jitter: float = hyper(
        0.0, "how much a client differs from round to round: deviation of its speed's logarithm", at_least=0, at_most=10
    )
    latency: float = hyper(0.0, "simulated seconds that a message takes, however short it is", at_least=0)
    bandwidth: float = hyper(0.0, "bytes in a simulated second between a client and the server (0: any)", at_least=0)
    bandwidth_spread: float = hyper(
        0.0, "how much clients differ in bandwidth: deviation of its logarithm", at_least=0, at_most=10
    )
    availability: float = hyper(1.0, "share of the rounds in which a client can be asked", above=0, at_most=1)
    affordable_max: float = hyper(
        0.0, "local epochs that a client can afford, at most, on average over rounds (0: any number)", at_least=0
    )
    affordable_min: float = hyper(0.0, "local epochs that a client can afford, at least, on average", at_least=0)
    affordable_spread: float = hyper(
        0.0, "how much they differ from round to round: deviation as a share of their average", at_least=0, at_most=10
    )

    def __post_init__(self) -> None:
        checked(self, "system")
        for field in dataclasses.fields(SystemConfig):
            owner = BELONGS.get(field.name)
            if owner and getattr(self, field.name) and not getattr(self, owner):
                raise Problem(f"system.{field.name} has no effect without system.{owner}: set that above 0")
        if self.affordable_min > self.affordable_max:
            raise Problem(
                f"system.affordable_min ({self.affordable_min:g}) is above system.affordable_max "
                f"({self.affordable_max:g})"
            )
