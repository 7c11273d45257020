"""FedSteg: FedHealth by another name, for networks of images."""

import torch
from reference import World, models, same
from torch import nn

from perfed.core.model import Model
from perfed.methods.fedhealth import FedHealth
from perfed.methods.fedsteg import FedSteg
from perfed.models import make_network
from perfed.models.config import ModelConfig
from perfed.training.catalog import methods


def image_net():
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 1), nn.Flatten(), nn.Linear(24, 5), nn.Linear(5, 3)
    )


def test_it_is_fedhealth_in_all_that_it_does(clients):
    world = World(image_net, clients, momentum=0.9)
    settings = {"k": 3.0, "warmup": 7, "tune_epochs": 2, "tune_batch": 8}
    found, expected = (world.run(kind, **settings) for kind in (FedSteg, FedHealth))
    same(found.server, expected.server)
    same(models(found), models(expected))
    assert methods()["fedsteg"].fields == methods()["fedhealth"].fields


def test_of_a_network_for_images_the_convolutions_stay():
    for name in ("lenet", "fedavgcnn"):
        model = Model(make_network(ModelConfig(name=name), (1, 28, 28), 10))
        part = model.part(FedSteg(model).tuned_part)
        assert torch.equal(part.mask, model.part("!conv*").mask)
