"""A zoo of networks as people bring them, each written by hand and as thin or as wide as a test wants it.

Every network takes samples of its shape and gives logits for CLASSES classes. Samples of tokens are whole numbers below
TOKENS, held as floats, as a table of samples holds them. `expected` is what a plain loop of PyTorch makes of one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perfed.core.clients import Clients, Split
from perfed.core.random import TRAIN, derive, shuffle

CLASSES, TOKENS, LENGTH = 4, 11, 6


def batch_norm(width: int) -> nn.Module:
    return nn.BatchNorm2d(width)


def group_norm(width: int) -> nn.Module:
    return nn.GroupNorm(2, width)


def instance_norm(width: int) -> nn.Module:
    return nn.InstanceNorm2d(width, affine=True)


def cumulative_norm(width: int) -> nn.Module:
    return nn.BatchNorm2d(width, momentum=None)


def no_statistics(width: int) -> nn.Module:
    return nn.BatchNorm2d(width, track_running_stats=False)


Norm = Callable[[int], nn.Module]


class BasicBlock(nn.Module):
    """ResNet-18's block, with ReLU in place as torchvision has it."""

    def __init__(self, before: int, width: int, stride: int, norm: Norm):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, width, 3, stride, 1, bias=False), norm(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), norm(width)
        self.downsample = None
        if stride > 1 or before != width:
            self.downsample = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), norm(width))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """ResNet for images of 32x32 pixels: with four stages of two blocks, ResNet-18."""

    def __init__(self, norm: Norm = batch_norm, width: int = 4, stages: int = 2, blocks: int = 1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, 1, 1, bias=False), norm(width)
        self.relu = nn.ReLU(inplace=True)
        layers, before = [], width
        for stage in range(stages):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                layers.append(BasicBlock(before, width * 2**stage, stride, norm))
                before = width * 2**stage
        self.layers, self.avgpool = nn.Sequential(*layers), nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(before, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        return self.fc(torch.flatten(self.avgpool(self.layers(x)), 1))


class Inverted(nn.Module):
    """MobileNetV2's inverted residual."""

    def __init__(self, before: int, width: int, stride: int, expand: int = 2):
        super().__init__()
        inside = before * expand
        self.residual = stride == 1 and before == width
        self.conv = nn.Sequential(
            nn.Conv2d(before, inside, 1, bias=False), nn.BatchNorm2d(inside), nn.ReLU6(inplace=True),
            nn.Conv2d(inside, inside, 3, stride, 1, groups=inside, bias=False), nn.BatchNorm2d(inside),
            nn.ReLU6(inplace=True), nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.residual else self.conv(x)


class MobileNet(nn.Module):
    def __init__(self, width: int = 4, dropout: float = 0.0):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU6(inplace=True),
            Inverted(width, width, 1), Inverted(width, 2 * width, 2),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(2 * width, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(F.adaptive_avg_pool2d(self.features(x), 1).flatten(1))


class Attention(nn.Module):
    """Self-attention by `scaled_dot_product_attention`, as ViTs and GPTs have it."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class ViTBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(width), Attention(width, heads, dropout), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, width: int = 8, heads: int = 2, blocks: int = 1, patch: int = 4, size: int = 8, dropout=0.0):
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.place = nn.Parameter(0.02 * torch.randn(1, 1 + (size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(ViTBlock(width, heads, dropout) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.place
        return self.head(self.norm(self.blocks(x))[:, 0])


class Words(nn.Module):
    """Tokens through an encoder of PyTorch, and the mean of what it returns."""

    def __init__(self, width: int = 8, heads: int = 2, layers: int = 1, dropout: float = 0.0, first: bool = False):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, width, padding_idx=0)
        self.register_buffer("place", torch.linspace(-1, 1, LENGTH)[:, None].expand(-1, width).clone())
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout, batch_first=True, norm_first=first)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=not first)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x.long()) + self.place).mean(1))


class Masked(Words):
    """The same, with padding masked: token 0 counts for nothing."""

    def forward(self, x: Tensor) -> Tensor:
        padding = x.long() == 0
        return self.head(self.encoder(self.embed(x.long()), src_key_padding_mask=padding)[:, 0])


class Recurrent(nn.Module):
    """Tokens through a recurrent layer of PyTorch."""

    def __init__(self, kind: str = "GRU", width: int = 5, layers: int = 1, both: bool = False, dropout: float = 0.0):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, width)
        self.rnn = getattr(nn, kind)(width, width, layers, batch_first=True, bidirectional=both, dropout=dropout)
        self.head = nn.Linear(2 * width if both else width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(self.embed(x.long()))
        return self.head(out[:, -1])


class LastState(Recurrent):
    """The same, from the last hidden state, with time first, as older code has it."""

    def __init__(self, kind: str = "LSTM", width: int = 5):
        super().__init__(kind, width)
        self.rnn = getattr(nn, kind)(width, width)

    def forward(self, x: Tensor) -> Tensor:
        _, state = self.rnn(self.embed(x.long()).transpose(0, 1))
        return self.head((state[0] if isinstance(state, tuple) else state)[-1])


class Characters(nn.Module):
    """Tokens one by one through a cell."""

    def __init__(self, width: int = 5):
        super().__init__()
        self.embed, self.cell, self.head = (
            nn.Embedding(TOKENS, width),
            nn.LSTMCell(width, width),
            nn.Linear(width, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for token in self.embed(x.long()).unbind(1):
            state = self.cell(token, state)
        assert state is not None
        return self.head(state[0])


class UNet(nn.Module):
    """Down, up again with what was on the way down, and a classifier on the mean of all pixels."""

    def __init__(self, width: int = 4, norm: Norm = batch_norm):
        super().__init__()
        double = lambda a, b: nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1), norm(b), nn.ReLU(inplace=True), nn.Conv2d(b, b, 3, padding=1), nn.LeakyReLU()
        )
        self.down1, self.down2, self.bottom = double(3, width), double(width, 2 * width), double(2 * width, 2 * width)
        self.pool = nn.MaxPool2d(2)
        self.up2 = nn.ConvTranspose2d(2 * width, 2 * width, 2, 2)
        self.join2, self.join1 = double(4 * width, width), double(2 * width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(self.pool(first))
        x = self.join2(torch.cat([self.up2(self.bottom(self.pool(second))), second], 1))
        x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(self.join1(torch.cat([x, first], 1)).mean((2, 3)))


class Tied(nn.Module):
    """Output weights that are the embedding's, as language models tie them."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.embed, self.hidden = nn.Embedding(TOKENS, width), nn.Linear(width, width)
        self.out = nn.Linear(width, TOKENS, bias=False)
        self.out.weight = self.embed.weight
        self.head = nn.Linear(TOKENS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.out(torch.tanh(self.hidden(self.embed(x.long()).mean(1)))))


class Frozen(nn.Module):
    """A backbone whose parameters are frozen, and that is run without gradients."""

    def __init__(self, no_grad: bool = True, flags: bool = True):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, 1), nn.ReLU())
        self.backbone.requires_grad_(not flags)
        self.no_grad, self.head = no_grad, nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.no_grad:
            with torch.no_grad():
                x = self.backbone(x)
        else:
            x = self.backbone(x)
        return self.head(x.mean((2, 3)))


class Several(nn.Module):
    """Several inputs in one tensor: numbers, a category and tokens."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.numbers = nn.Sequential(nn.Linear(3, width), nn.LayerNorm(width), nn.SiLU())
        self.category, self.tokens = nn.Embedding(TOKENS, width), nn.Embedding(TOKENS, width)
        self.head = nn.Linear(3 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        numbers, category, tokens = x[:, :3] / TOKENS, x[:, 3].long(), x[:, 4:].int()
        parts = [self.numbers(numbers), self.category(category), self.tokens(tokens).max(1).values]
        return self.head(torch.cat(parts, 1))


class Functional(nn.Module):
    """Dropout as a function: in a user's code, or of whole channels."""

    def __init__(self, p: float = 0.4):
        super().__init__()
        self.conv, self.p = nn.Conv2d(3, 6, 3, 2), p
        self.hidden, self.head = nn.Linear(54, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout2d(F.relu(self.conv(x)), self.p, self.training).flatten(1)
        x = F.relu(self.hidden(F.dropout(x, self.p, training=self.training)))
        return self.head(torch.dropout(x, self.p, self.training))


class InPlace(nn.Module):
    """Operations in place, on what the network has made itself."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = F.relu_(x)
        y = self.second(x)
        y.add_(x).mul_(0.5)
        y[:, 0] = 0.0
        y[:, 1] += x[:, 2]
        return self.head(y.sigmoid_().mean((2, 3)))


class Notebook(InPlace):
    """The same, writing into a tensor of zeros, which is one tensor for all clients."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(x.shape[0], 4, dtype=x.dtype, device=x.device)
        out += self.first(x).mean((2, 3))
        return self.head(out)


class ByValue(nn.Module):
    """Control flow that looks at the numbers of a tensor."""

    def __init__(self):
        super().__init__()
        self.small, self.large = nn.Linear(LENGTH, CLASSES), nn.Linear(LENGTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.large(x) if x.mean() > TOKENS / 2 else self.small(x)


class Noisy(nn.Module):
    """Random numbers of the network's own."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(LENGTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + 0.1 * torch.randn_like(x) if self.training else x)


class Mixing(nn.Module):
    """Attention over the samples of a batch: the output for one depends on the others."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(LENGTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x - x.mean(0))


def normed(kind: str) -> nn.Module:
    """Weights that are computed from others, by PyTorch's parametrisations."""
    layer = {"spectral": nn.utils.parametrizations.spectral_norm, "weight": nn.utils.parametrizations.weight_norm}[kind]
    return nn.Sequential(layer(nn.Linear(LENGTH, 8)), nn.ReLU(), nn.Linear(8, CLASSES))


def series() -> nn.Module:
    """Several series of numbers, with BatchNorm over [samples, channels, length]."""
    return nn.Sequential(
        nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(12, CLASSES)
    )


class Sparse(nn.Module):
    """An embedding with sparse gradients, or one that shortens its vectors when they are used."""

    def __init__(self, max_norm: float | None = None):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 4, max_norm=max_norm, sparse=max_norm is None)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x.long()).mean(1))


class Elsewhere(nn.Module):
    """A parameter that is also kept where no name leads to it."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(LENGTH, 4), nn.Linear(4, CLASSES)
        self.kept = [self.hidden.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x @ self.kept[0].T)


IMAGE, WORDS = (3, 8, 8), (LENGTH,)


@dataclass(frozen=True)
class Animal:
    """A network: how it is made, what it takes, and whether it draws random numbers."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    random: bool = False


ZOO: dict[str, Animal] = {
    "resnet-batch": Animal(ResNet, IMAGE),
    "resnet-group": Animal(lambda: ResNet(group_norm), IMAGE),
    "resnet-instance": Animal(lambda: ResNet(instance_norm), IMAGE),
    "mobilenet": Animal(MobileNet, IMAGE),
    "mobilenet-dropout": Animal(lambda: MobileNet(dropout=0.3), IMAGE, random=True),
    "vit": Animal(ViT, IMAGE),
    "vit-dropout": Animal(lambda: ViT(dropout=0.3), IMAGE, random=True),
    "transformer": Animal(Words, WORDS),
    "transformer-dropout": Animal(lambda: Words(dropout=0.3, layers=2), WORDS, random=True),
    "transformer-norm-first": Animal(lambda: Words(dropout=0.3, first=True), WORDS, random=True),
    "transformer-masked": Animal(Masked, WORDS),
    "gru": Animal(Recurrent, WORDS),
    "gru-both-ways": Animal(lambda: Recurrent("GRU", layers=2, both=True), WORDS),
    "gru-dropout": Animal(lambda: Recurrent("GRU", layers=2, dropout=0.4), WORDS, random=True),
    "lstm": Animal(lambda: Recurrent("LSTM"), WORDS),
    "lstm-last-state": Animal(LastState, WORDS),
    "rnn": Animal(lambda: Recurrent("RNN"), WORDS),
    "lstm-cell": Animal(Characters, WORDS),
    "unet": Animal(UNet, IMAGE),
    "tied": Animal(Tied, WORDS),
    "sparse": Animal(Sparse, WORDS),
    "frozen": Animal(Frozen, IMAGE),
    "frozen-by-context": Animal(lambda: Frozen(flags=False), IMAGE),
    "frozen-by-flags": Animal(lambda: Frozen(no_grad=False), IMAGE),
    "several-inputs": Animal(Several, (3 + 1 + LENGTH,)),
    "functional-dropout": Animal(Functional, IMAGE, random=True),
    "in-place": Animal(InPlace, IMAGE),
    "weight-norm": Animal(lambda: normed("weight"), WORDS),
    "spectral-norm": Animal(lambda: normed("spectral"), WORDS),
    "conv1d": Animal(series, (3, 8)),
}


# What no engine, or not every engine, can train.
WILD: dict[str, Animal] = {
    "cumulative": Animal(lambda: ResNet(cumulative_norm), IMAGE),
    "no-statistics": Animal(lambda: ResNet(no_statistics), IMAGE),
    "by-value": Animal(ByValue, WORDS),
    "notebook": Animal(Notebook, IMAGE),
    "noisy": Animal(Noisy, WORDS),
    "mixing": Animal(Mixing, WORDS),
    "bfloat16": Animal(lambda: ResNet().bfloat16(), IMAGE),
    "float64": Animal(lambda: ResNet().double(), IMAGE),
    "renormed": Animal(lambda: Sparse(max_norm=1.0), WORDS),
    "elsewhere": Animal(Elsewhere, WORDS),
}


def full_size(kind: str) -> nn.Module:
    """ResNet-18 for images of 32x32 pixels: 11.2 million numbers."""
    return ResNet({"batch": batch_norm, "group": group_norm}[kind], width=64, stages=4, blocks=2)


# ---------------------------------------------------------------------- two clients, and a plain loop

SETTINGS = {"lr": 0.1, "epochs": 2, "batch_size": 4}
RAGGED, EVEN = (8, 6), (8, 8)  # with a partial batch, and without
ORDER = 5  # the seed of the initial model and of batches


def clients(shape: tuple[int, ...], sizes: tuple[int, ...] = RAGGED, dtype: torch.dtype = torch.float64) -> Clients:
    """Two clients with random samples: noise as images, tokens as words."""
    draw = torch.Generator().manual_seed(0)

    def split(counts: tuple[int, ...]) -> Split:
        whole = (sum(counts), *shape)
        words = torch.randint(0, TOKENS, whole, generator=draw).to(dtype)
        x = torch.randn(whole, generator=draw, dtype=torch.float64).to(dtype) if len(shape) > 1 else words
        return Split(x, torch.randint(0, CLASSES, whole[:1], generator=draw), counts)

    names = tuple(f"client_{number}" for number in range(len(sizes)))
    return Clients(names, split(sizes), split((2,) * len(sizes)), split((3,) * len(sizes)), CLASSES)


def expected(animal: Animal, data: Clients) -> dict[str, Tensor]:
    """A round of federated averaging in plain PyTorch: only the order of the samples is perfed's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(ORDER)
        first = animal.build().double()
    trained = []
    for client, (start, size) in enumerate(zip(data.train.start, data.train.size, strict=True)):
        net = copy.deepcopy(first).train()
        optimiser = torch.optim.SGD(net.parameters(), SETTINGS["lr"])
        key = derive(ORDER, TRAIN, 1, 0, client, 0, 0)
        for epoch in range(SETTINGS["epochs"]):
            order = shuffle(derive(key, 0, epoch)[None], torch.tensor([size]), size)[0] + start
            for rows in order.split(SETTINGS["batch_size"]):
                optimiser.zero_grad()
                F.cross_entropy(net(data.train.x[rows]), data.train.y[rows]).backward()
                optimiser.step()
        trained.append(net.state_dict())
    total = sum(data.train.size)
    share = lambda name: sum(n / total * state[name] for n, state in zip(data.train.size, trained, strict=True))
    return {name: share(name) for name, value in trained[0].items() if value.is_floating_point()}
