"""FedMD: clients exchange logits on public samples, and no models."""

import copy
import dataclasses

import pytest
import torch
from reference import (
    NEVER,
    ROUNDS,
    Mixed,
    World,
    check_kept,
    check_no_alias,
    close,
    differs,
    flat,
    per_client,
    personal,
    plain_net,
    same,
    state_of,
)
from torch import nn
from torch.nn import functional as F

from perfed.core.errors import Problem
from perfed.core.model import Batch, Model
from perfed.core.optim import adam_start
from perfed.core.task import Regression
from perfed.federation.traffic import PUBLIC_DATA
from perfed.methods.fedmd import FedMD
from perfed.methods.local import Local
from perfed.training.newcomers import visited

FAST = {"public_epochs": 2, "private_epochs": 3, "digest_epochs": 2, "public_lr": 0.02, "public_batch": 5}
DISTANCE = {"absolute": F.l1_loss, "squared": F.mse_loss}


def norm_net():
    """Without a bias before BatchNorm: its gradient is rounding, which Adam divides by itself."""
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


class Client:
    """One client in plain torch: its network, and the optimiser that it digests with."""

    def __init__(self, world, i, rate):
        self.world, self.i, self.net = world, i, world.net_of(i)
        self.adam = torch.optim.Adam(self.net.parameters(), rate)
        self.prepared = False

    def own_training(self, round, exchange, epochs=None):
        trained = self.world.train(self.net, self.world.batches(self.i, round, epochs, exchange=exchange))
        self.net.load_state_dict(trained.state_dict())  # in place: the optimiser knows these tensors

    def study(self, optimiser, rows, loss):
        self.net.train()
        for index in rows:
            optimiser.zero_grad()
            loss(self.net(self.world.clients.public.x[index]), index).backward()
            optimiser.step()

    def prepare(self, round, public_epochs, private_epochs, size, rate):
        labels = self.world.clients.public.y
        rows = self.world.public_rows(self.i, round, public_epochs, size, exchange=-1)
        fresh = torch.optim.Adam(self.net.parameters(), rate)
        self.study(fresh, rows, lambda out, index: F.cross_entropy(out, labels[index]))
        self.own_training(round, -1, private_epochs)
        self.prepared = True

    def logits(self):
        with torch.no_grad():
            return self.net.eval()(self.world.clients.public.x)

    def listen(self, round, consensus, distance, epochs, size, exchange=1):
        rows = self.world.public_rows(self.i, round, epochs, size, exchange=exchange)
        self.study(self.adam, rows, lambda out, index: DISTANCE[distance](out, consensus[index]))
        self.own_training(round, exchange)


def reference(world, public_epochs, private_epochs, digest_epochs, public_lr, public_batch, distance="absolute",
              rounds=ROUNDS, wrong=""):  # fmt: skip
    """`wrong`: 'late' uploads after digesting, 'anew' begins Adam in each round, 'samples' weights by them."""
    clients, consensus = [Client(world, i, public_lr) for i in range(5)], None
    for round, cohort in enumerate(rounds, 1):
        there = [clients[i] for i in cohort]
        for client in there:
            if not client.prepared:
                client.prepare(round, public_epochs, private_epochs, public_batch, public_lr)
        weight = [world.count(client.i) if wrong == "samples" else 1 for client in there]
        said = sum(w * client.logits() for w, client in zip(weight, there, strict=True)) / sum(weight)
        if wrong != "late" or round == 1:
            consensus = said
        for client in there:
            if wrong == "anew":
                client.adam = torch.optim.Adam(client.net.parameters(), public_lr)
            client.listen(round, consensus, distance, digest_epochs, public_batch)
        if wrong == "late":
            consensus = sum(client.logits() for client in there) / len(there)
    return [client.net for client in clients], consensus


@pytest.mark.parametrize("distance", DISTANCE)
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, distance, clients):
    """A client that joins late has its first training then; Adam on the mean logits goes on from round to round."""
    world = World(build, clients, momentum=0.9)
    fed = world.run(FedMD, distance=distance, **FAST)
    nets, consensus = reference(world, **FAST, distance=distance)
    same(fed.server, consensus)
    for i, theta in enumerate(personal(fed)):
        close(theta, flat(nets[i]))
    assert differs(fed.server, torch.zeros_like(fed.server))


def test_networks_that_differ_equal_the_reference(clients):
    """They have only the logits in common, and bytes do not depend on who has which."""
    world = Mixed([plain_net, norm_net], clients)
    fed = world.run(FedMD, **FAST)
    nets, consensus = reference(world, **FAST)
    same(fed.server, consensus)
    for i, theta in enumerate(personal(fed)):
        close(theta, flat(nets[i]))
    assert len({len(flat(net)) for net in nets}) == 2
    assert per_client(fed) == (len(consensus) * 3, len(consensus) * 3)


@pytest.mark.parametrize("wrong", ["late", "anew", "samples"])
def test_other_rules_give_something_else(wrong, clients):
    """Logits sent after digesting, Adam begun anew in each round, a mean weighted by samples."""
    world = World(plain_net, clients)
    nets, _ = reference(world, **FAST, wrong=wrong)
    assert differs(personal(world.run(FedMD, **FAST))[0][: len(flat(nets[0]))], flat(nets[0]))


def test_without_digesting_nobody_learns_of_anybody(clients):
    """It is local training after the same start, whoever else is there."""
    world, settings = World(norm_net, clients), FAST | {"digest_epochs": 0}
    fed, alone = world.run(FedMD, **settings), world.run(FedMD, [(0,), (2,), (0, 2)], **settings)
    together, nets = personal(fed), reference(world, **settings)[0]
    close(together[0], flat(nets[0]))
    fed = world.run(FedMD, [(0, 1, 3), (2,), (0, 2)], **settings)
    same(personal(fed)[0], personal(alone)[0])
    same(personal(fed)[2], personal(alone)[2])
    digesting = world.run(FedMD, [(0, 1, 3), (2,), (0, 2)], **FAST)
    assert differs(personal(digesting)[0], personal(alone)[0])


@pytest.mark.parametrize("distance", DISTANCE)
def test_one_client_alone_learns_nothing_from_its_own_logits(distance, clients):
    method, x = World(plain_net, clients).federation(FedMD, distance=distance, **FAST).method, clients.public.x
    theta, batch = method.model.init(3), Batch(x, clients.public.y, None, torch.tensor(0), torch.arange(len(x)))
    own = method.logits(batch, theta)
    assert torch.equal(method.digest((theta, adam_start(theta)), batch, own)[0], theta)
    assert differs(method.digest((theta, adam_start(theta)), batch, own + 0.1)[0], theta)


def test_without_preparation_and_digesting_it_is_plain_training(clients):
    world = World(plain_net, clients)
    fed = world.run(FedMD, [(0, 1)], public_epochs=0, private_epochs=0, digest_epochs=0)
    for i in (0, 1):
        close(state_of(fed, i)["theta"], flat(world.train(world.net(), world.batches(i, 1, exchange=1))))
    local = World(plain_net, clients).run(Local, [(0, 1)])
    assert (personal(fed)[0] - personal(local)[0]).abs().max() < 0.1  # but for the order of the batches


def test_logits_of_classes_without_public_samples_carry_knowledge(clients):
    """Nobody masks them: client 0 hears of class 2, which neither it nor the public samples have."""
    public = dataclasses.replace(clients.public, y=clients.public.y.clamp_max(1))
    train = dataclasses.replace(clients.train, y=clients.train.y.clone())
    first = slice(clients.train.start[0], clients.train.start[0] + clients.train.size[0])
    train.y[first] = train.y[first].clamp_max(1)
    world = World(plain_net, dataclasses.replace(clients, public=public, train=train))
    settings = FAST | {"digest_epochs": 30, "public_lr": 0.05}
    hears = world.run(FedMD, [(0, 2)], **settings)
    deaf = world.run(FedMD, [(0, 2)], **settings | {"digest_epochs": 0})
    of = lambda fed: fed.method.model.apply(state_of(fed, 0)["theta"], public.x)[0][:, 2]
    assert hears.server[:, 2].mean() > of(deaf).mean() + 0.1
    assert (of(hears) - hears.server[:, 2]).abs().mean() < 0.7 * (of(deaf) - hears.server[:, 2]).abs().mean()


def test_the_gradient_of_absolute_differences_does_not_shrink(clients):
    """Near the mean it is as long as far away: hence a small rate, or the squared distance."""
    world = World(plain_net, clients)
    length = {}
    for distance in DISTANCE:
        method = world.federation(FedMD, distance=distance, **FAST).method
        theta, x = method.model.init(0), clients.public.x
        batch = Batch(x, clients.public.y, None, torch.tensor(0), torch.arange(len(x)))
        out = method.model.apply(theta, x)[0]
        for near in (1.0, 1e-3):
            _, (m, _, _) = method.digest((theta, adam_start(theta)), batch, out - near)
            length[distance, near] = float(m.norm())  # a tenth of the gradient
    assert length["absolute", 1e-3] == pytest.approx(length["absolute", 1.0])
    assert length["squared", 1e-3] == pytest.approx(1e-3 * length["squared", 1.0])


def test_clients_that_sit_out_are_left_alone(clients):
    fed = World(norm_net, clients).run(FedMD, **FAST)
    before = {i: copy.deepcopy(state_of(fed, i)) for i in range(5)}
    fed.step((0, 1))
    check_kept(fed, before, (2, 3, NEVER))
    close(state_of(fed, NEVER)["theta"], flat(World(norm_net, clients).net()))
    check_no_alias(fed)


def test_only_logits_travel(clients):
    """As many numbers as public samples times classes, each way; the public samples themselves once to each client."""
    fed = World(plain_net, clients).run(FedMD, **FAST)
    numbers = len(clients.public.y) * clients.classes
    assert per_client(fed) == (numbers, numbers)
    assert fed.traffic.up_own == fed.traffic.down_own == 0
    sample = clients.public.x[0].numel() * 8 + 8
    assert fed.traffic.extra == {PUBLIC_DATA: 4 * len(clients.public.y) * sample}  # client 4 never takes part


def test_a_newcomer_is_prepared_once_and_digests_the_last_mean(clients):
    world = World(plain_net, clients)
    fed = world.run(FedMD, **FAST)
    method = visited(fed.method, fed.server)
    guest = world.federation(lambda model, **_: dataclasses.replace(method, model=model))
    mine = Client(world, NEVER, FAST["public_lr"])
    mine.prepare(1, FAST["public_epochs"], FAST["private_epochs"], FAST["public_batch"], FAST["public_lr"])
    for round in (1, 2):
        guest.step((NEVER,))
        mine.listen(round, fed.server, "absolute", FAST["digest_epochs"], FAST["public_batch"], exchange=0)
        close(state_of(guest, NEVER)["theta"], flat(mine.net))
    assert guest.traffic.up == 0


def test_refuses_what_it_cannot_use(clients):
    world = World(plain_net, clients)
    with pytest.raises(Problem, match="fedmd exchanges logits of classes, and this task is regression"):
        FedMD(Model(plain_net, task=Regression(3)))
    with pytest.raises(Problem, match="digest_epochs must be at least 0"):
        world.federation(FedMD, digest_epochs=-1)
    with pytest.raises(Problem, match="distance must be one of absolute, squared"):
        world.federation(FedMD, distance="cosine")
    unlabelled = dataclasses.replace(clients, public=dataclasses.replace(clients.public, labelled=False))
    with pytest.raises(Problem, match="FedMD needs labelled public samples"):
        world.federation(FedMD, unlabelled)
