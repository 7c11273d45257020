"""A model that makes use of the machine."""

from __future__ import annotations

from perfed.core.model import Model


def FastModel(model: Model, kernels: bool = False) -> Model:  # noqa: ARG001
    """Return the model: it knows of the machine by itself."""
    return model
