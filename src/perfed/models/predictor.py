"""A client's model as an ordinary module, where a method predicts in its own way."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from perfed.core.method import Method
from perfed.engines.trees import pack, paths, unpack


class Predictor(nn.Module):
    """Predict as a method does, with one client's model: its tensors are buffers."""

    def __init__(self, method: Method, model: Any):
        """Make the module.

        Args:
            method: knows how to predict.
            model: a theta, or any tree of tensors that the method's `predict` takes.
        """
        super().__init__()
        self.method = method
        self._skeleton, tensors = pack(model)
        self._names = paths(model, "model")
        for name, tensor in zip(self._names, tensors, strict=True):
            self.register_buffer(name.replace(".", "_"), tensor)

    def extra_repr(self) -> str:
        """Say whose prediction it is."""
        return type(self.method).__name__

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for samples."""
        tensors = [getattr(self, name.replace(".", "_")) for name in self._names]
        return self.method.predict(unpack(self._skeleton, tensors), x)


def dtype_of(network: nn.Module) -> Any:
    """Return the type of a module's numbers, parameters or buffers."""
    tensors = [*network.parameters(), *network.buffers()]
    return next(tensor.dtype for tensor in tensors if tensor.is_floating_point())
