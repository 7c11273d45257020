"""What references share that know of public samples: the library's batches and draws of them, and nothing else."""

import torch

from perfed.core.random import REFINE, derive, shuffle


def samples_of(clients):
    """All public samples and their labels."""
    return clients.public.x, clients.public.y


def refine_batches(clients, order, round, steps, batch_size, stream=0):
    """The server's batches after a round (0: before the first): `steps` of them, in as many epochs as that takes."""
    x, y = samples_of(clients)
    key = derive(order, REFINE, round, 0, stream, 0)
    out, epoch = [], 0
    while len(out) < steps:
        places = shuffle(derive(key, 0, epoch)[None], torch.tensor([len(y)]), len(y))[0]
        out += [(x[part], y[part]) for part in places.split(batch_size)]
        epoch += 1
    return out[:steps]
