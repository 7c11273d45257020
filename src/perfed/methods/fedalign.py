"""FedAlign: FedAvg with a term that gives the last block the same Lipschitz constant at a quarter of its width.

Mendieta, Yang, Wang, Lee, Ding, Chen: Local Learning Matters: Rethinking Data Heterogeneity in Federated Learning.
CVPR 2022. https://arxiv.org/abs/2111.14213

The block runs a second time with the first omega of its channels, on the same (detached) input. The Lipschitz constant
of a pass is the spectral norm of T = (input features) (output features)^T / pixels, sample by sample, by ten power
iterations from ones; the squared difference of the two, loss_lip, is scaled to mu times the cross-entropy. As in the
authors' code the gradient goes through the iterations, reaches the narrow pass alone, and is clipped as a whole. The
block (`module`) is by default the last module with convolutions: a ResNet's last stage (as there), a CNN's last layer.
BatchNorm in the narrow pass uses the statistics of its batch and keeps none, as in the code, which measures them anew
before it tests clients; here the averaged ones are evaluated, as for FedAvg. Not from the code: widths are rounded to
whole channels, not to multiples of 8, groups of GroupNorm keep their size, and dropout is off in the narrow pass.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from perfed.core.errors import Problem, nearest
from perfed.core.fields import hyper
from perfed.core.messages import Up
from perfed.core.model import average
from perfed.methods.fedavg import FedAvg
from perfed.methods.shared.two_widths import TwoWidths, last_block

TINY = 1e-30  # in place of 0 as a divisor: features may be dead, and the two constants equal
POOL = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}


@dataclass(frozen=True)
class FedAlign(FedAvg):
    mu: float = hyper(0.45, "weight of the Lipschitz term, in multiples of the cross-entropy; 0 is none", at_least=0)
    omega: float = hyper(0.25, "width of the narrow pass", above=0, below=1)
    clip: float = hyper(10.0, "largest norm of a gradient, longer ones are shortened; 0 is no limit", at_least=0)
    module: str = hyper("", "name of the block, which runs twice (default: the last module with convolutions)")

    category = "global model: regularised local loss"

    def check(self):
        self.wide  # noqa: B018 (refuses a block that cannot run at another width)

    @cached_property
    def wide(self):
        """The network with the second pass beside it, as functions of the same theta."""
        usual, net = self.model, self.model.module(self.model.zeros())
        block = self.module or last_block(net, usual.head_name)
        if not block:
            raise Problem("fedalign needs a network with convolutions before its head, such as fedavgcnn or resnet")
        if block not in (known := [name for name, _ in net.named_modules() if name]):
            raise Problem(f"fedalign.module: the network has no module '{block}'{nearest(block, known)}")
        build = lambda: TwoWidths(usual.build(), block, self.omega)
        return usual.like(build)

    def spectral(self, features):
        """Return the spectral norm of each sample's T."""
        a, b = features
        if a.shape[2:] != b.shape[2:]:
            a = POOL[a.dim() - 2](a, b.shape[2:])
        T = a.flatten(2) @ b.flatten(2).transpose(1, 2) / b[0, 0].numel()
        K = T @ T.transpose(1, 2)
        v = n = torch.ones_like(K[:, :, :1])
        for _ in range(10):
            v = K @ v
            n = v.norm(dim=1, keepdim=True)
            v = v / n.clamp_min(TINY)
        return n.clamp_min(TINY).sqrt().flatten()

    def loss(self, w, batch, train):
        (logits, teacher, student), fresh = self.wide.apply(w, batch.x, train, batch.weight, batch.key)
        each = self.model.task.losses(logits, batch.y)
        ce = average(self.model.by_class(each, batch.y), batch.weight)
        lip = average((self.spectral(student) - self.spectral(teacher)) ** 2, batch.weight)
        scale = (ce / lip.clamp_min(TINY)).detach()
        return ce + self.mu * scale * lip, fresh

    def aligned(self, w, batch, given):
        g, fresh, _ = self.model.grad(w, batch, self.loss)
        return g, fresh

    def local(self, client, down, data):
        w = self.descend(down.shared, data, self.aligned)
        return client, Up(mean=w - down.shared)
