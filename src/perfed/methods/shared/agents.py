"""Agents that come with perfed: each knows one federation, and says by a fingerprint which."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "agents"
NEAR = 1e-3  # relative: models differ by less on other engines, and by far more in another federation


def agent_of(fingerprint: Tensor, numbers: int) -> Tensor | None:
    """Return the weights of the agent that was made for a federation; None: there is none.

    Args:
        fingerprint: what the models of all clients are after one round from the initial model: it follows from their
            samples, the network, the seed, and all settings of local training.
        numbers: of weights that are needed.
    """
    for file in sorted(FOLDER.glob("*.safetensors")):
        tensors = load_file(file)
        known, q = tensors["fingerprint"].to(fingerprint), tensors["q"]
        alike = known.shape == fingerprint.shape and len(q) == numbers
        if alike and (known - fingerprint).norm() <= NEAR * known.norm():
            return q.to(fingerprint)
    return None
