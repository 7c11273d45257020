"""FedDF: a mean of models that is taught by all of them."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from public_samples import refine_batches
from reference import (
    NEVER,
    ORDER,
    ROUNDS,
    Mixed,
    World,
    average,
    check_no_alias,
    close,
    differs,
    flat,
    per_client,
    personal,
    plain_net,
    same,
)
from torch import nn
from torch.nn import functional as F

from perfed.core.errors import Problem
from perfed.core.messages import Cohort
from perfed.core.model import Batch, Model
from perfed.core.optim import adam_start
from perfed.core.task import Multilabel
from perfed.methods.fedavg import FedAvg
from perfed.methods.feddf import FedDF

FAST = {"distil_steps": 9, "distil_lr": 0.02, "distil_batch": 5}
ENSEMBLES = ("avg_logits", "avg_losses", "avg_probs")


def norm_net():
    """Without a bias before BatchNorm: its gradient is rounding, which Adam divides by itself."""
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def divergence(out, log_target):
    return F.kl_div(F.log_softmax(out, 1), log_target, reduction="batchmean", log_target=True)


def distance(out, said, ensemble):
    """What the student is to make small, with the teachers' outputs for the same batch."""
    if ensemble == "avg_logits":
        return divergence(out, torch.stack(said).mean(0).log_softmax(1))
    if ensemble == "avg_probs":
        return divergence(out, torch.stack(said).softmax(2).mean(0).log())
    return sum(divergence(out, each.log_softmax(1)) for each in said) / len(said)


def distilled(world, student, teachers, round, distil_steps, distil_lr, distil_batch, ensemble="avg_logits"):
    """A copy of the student; its teachers look at each batch anew."""
    student, teachers = copy.deepcopy(student).train(), [copy.deepcopy(net).eval() for net in teachers]
    optimiser = torch.optim.Adam(student.parameters(), distil_lr)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, distil_steps)
    for x, _ in refine_batches(world.clients, ORDER, round, distil_steps, distil_batch):
        with torch.no_grad():
            said = [net(x) for net in teachers]
        optimiser.zero_grad()
        distance(student(x), said, ensemble).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 5)
        optimiser.step()
        cosine.step()
    return student


def reference(world, of=(0, 0, 0, 0, 0), rounds=ROUNDS, **about):
    """The models of all networks; `of` says who has which."""
    models = {of[i]: world.net_of(i) for i in range(5)}
    for round, cohort in enumerate(rounds, 1):
        nets = {i: world.train(models[of[i]], world.batches(i, round)) for i in cohort}
        for k in {of[i] for i in cohort}:
            mine = [i for i in cohort if of[i] == k]
            mean = average([nets[i] for i in mine], [world.count(i) for i in mine])
            models[k] = distilled(world, mean, list(nets.values()), round, **about)
    return models


@pytest.mark.parametrize("ensemble", ENSEMBLES)
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, ensemble, clients):
    """Its teachers look at each batch; here what they say of all public samples is computed once in a round."""
    world = World(build, clients, momentum=0.9)
    fed = world.run(FedDF, ensemble=ensemble, **FAST)
    w = reference(world, ensemble=ensemble, **FAST)[0]
    close(fed.server[0], flat(w))
    for theta in personal(fed):
        close(theta, flat(w))


ALONE = ((0, 1, 3), (0, 3), (1, 2))  # nobody has the second network in the second round, nobody the first in the last


@pytest.mark.parametrize("ensemble", ENSEMBLES)
def test_networks_that_differ_equal_the_reference(ensemble, clients):
    """Each has a student of its own and all models as teachers; one that nobody of a round has stays as it was."""
    world = Mixed([plain_net, norm_net], clients)
    fed = world.run(FedDF, ALONE, ensemble=ensemble, **FAST)
    models = reference(world, world.of, ALONE, ensemble=ensemble, **FAST)
    for i, theta in enumerate(personal(fed)):
        close(theta, flat(models[world.of[i]]))
    small, large = (len(flat(models[k])) for k in (0, 1))
    sent = 8 * (2 * small + large + 2 * small + 2 * large)
    assert (fed.traffic.down, fed.traffic.up) == (sent, sent + 8 * 7)


def test_there_is_no_general_model_of_networks_that_differ(clients):
    fed = Mixed([plain_net, norm_net], clients).run(FedDF, ALONE[:1], **FAST)
    with pytest.raises(Problem, match="no model for everybody: clients have networks that differ"):
        fed.method.global_model(fed.server)


def test_a_network_all_of_whose_models_are_left_out_has_their_mean_as_student(clients):
    """The teachers are then the other network's alone."""
    world = Mixed([plain_net, norm_net], clients)
    taught, plain = (world.run(FedDF, ALONE[:1], **FAST | {"distil_steps": steps}) for steps in (9, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedDF, "kept", lambda self, right: torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64))
        without, start = (
            world.run(FedDF, ALONE[:1], drop_worst=True, **FAST | {"distil_steps": steps}) for steps in (9, 0)
        )
    same(start.server[1], plain.server[1])
    assert differs(without.server, taught.server)


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_without_steps_it_is_fedavg(build, clients):
    world = World(build, clients, momentum=0.9)
    same(world.run(FedDF, distil_steps=0).server[0], world.run(FedAvg).server)


@pytest.mark.parametrize(("build", "stays"), [(plain_net, True), (norm_net, False)])
def test_one_model_alone_has_nothing_to_teach_itself(build, stays, clients):
    """But for BatchNorm, with which it sees a batch otherwise as student than as teacher."""
    method, x = World(build, clients).federation(FedDF, **FAST).method, clients.public.x
    w, batch = method.model.init(3), Batch(x, clients.public.y, None, torch.tensor(0), torch.arange(len(x)))
    _, (m, _, _) = method.distil((w, adam_start(w)), batch, method.says(batch, w)[0].softmax(-1))
    assert (float(m.norm()) < 1e-15) == stays


def refined(fed, models, samples=None, **context):
    """What the server makes of models that it was sent."""
    models = torch.stack(models)
    own = {"w": models, "samples": torch.ones(len(models), dtype=torch.int64) if samples is None else samples}
    cohort = Cohort(torch.arange(len(models)), (), own, torch.tensor(1.0), len(models))
    method = fed.method.at(round=1, **context)
    return fed.engine.refine(0, method.context, method.aggregate(fed.server, cohort), cohort)[0]


def opposite(model, w):
    """The model whose logits are the negative ones."""
    return model.head.put(w, -model.head.take(w))


def test_opposite_teachers_teach_that_all_classes_are_alike(clients):
    fed = World(plain_net, clients).federation(FedDF, distil_steps=400, distil_lr=0.05, distil_batch=13)
    model, x = fed.method.model, clients.public.x
    w = 5 * model.init(3)
    fed.server = w[None]
    logits = model.apply(opposite(model, w), x)[0]
    same(logits, -model.apply(w, x)[0])
    many = torch.tensor([3, 1])  # the student begins between them, and nearer to the first
    taught = model.apply(refined(fed, [w, opposite(model, w)], many), x)[0].softmax(1)
    before = model.apply(model.weights.only(0.75 * w + 0.25 * opposite(model, w)), x)[0].softmax(1)
    assert (before - 1 / 3).abs().max() > 0.3
    assert (taught - 1 / 3).abs().max() < 0.02


def test_losses_and_probabilities_have_one_gradient_and_logits_another(clients):
    world = World(plain_net, clients)
    logits, losses, probs = (world.run(FedDF, ensemble=ensemble, **FAST).server for ensemble in ENSEMBLES)
    same(losses, probs)
    assert differs(logits, probs)


def test_probabilities_of_experts_are_of_two_minds_where_logits_are_not(clients):
    """Each is sure of a wrong class outside its own: the mean of their probabilities cannot tell who knows."""
    knows, guesses = torch.tensor([[9.0, -9.0, -9.0]]), torch.tensor([[-3.0, 4.0, -3.0]])
    assert float((knows + guesses).div(2).softmax(1)[0, 0]) > 0.95
    assert float((knows.softmax(1) + guesses.softmax(1)).div(2)[0, 0]) < 0.51


def test_gradients_are_5_long_at_most_and_the_rate_falls_along_a_cosine(clients):
    method = World(plain_net, clients).federation(FedDF, **FAST | {"distil_steps": 4}).method
    w = 30 * method.model.init(0)
    batch = Batch(clients.public.x, clients.public.y, None, torch.tensor(0), torch.arange(13))
    target = torch.eye(3, dtype=torch.float64)[torch.arange(13) % 3]
    moved, (m, _, _) = method.distil((w, adam_start(w)), batch, target)
    assert float(10 * m.norm()) == pytest.approx(5)
    assert float((moved - w).abs().max()) == pytest.approx(0.02)  # Adam's first step is as long as its rate
    zero, one = torch.zeros_like(w), torch.ones_like(w[0])
    lengths = [
        float((method.distil((w, (zero, zero, one * step)), batch, target)[0] - w).abs().max()) for step in range(5)
    ]
    shares = [length / first for length, first in zip(lengths, corrected(range(5)), strict=True)]
    assert shares == pytest.approx([0.02 * share for share in (1, 0.8535534, 0.5, 0.1464466, 0)], abs=1e-6)


def corrected(steps):
    """How long a step of Adam at rate 1 is after so many without any gradient."""
    return [(0.1 / (1 - 0.9 ** (t + 1))) / (0.001 / (1 - 0.999 ** (t + 1))) ** 0.5 for t in steps]


# ---------------------------------------------------------------------- who is left out


def left(right, classes):
    """The authors' rule, in numbers of numpy: those who stay."""
    below = [k for k, share in enumerate(right) if share < 1.2 / classes]
    if below:
        return [k for k in range(len(right)) if k not in below]
    others = sorted(right)[:-1]
    low = np.mean(others) - 1.5 * np.std(others)
    return [k for k, share in enumerate(right) if share >= low]


@pytest.mark.parametrize(("right", "stay"), [
    ((0.5, 0.6, 0.41, 0.39, 0.1), [0, 1, 2]),  # 1.2 times chance is 0.4
    ((0.9, 0.88, 0.91, 0.89, 0.5), [0, 1, 2, 3]),
    ((0.9, 0.8, 0.7, 0.6), [0, 1, 2, 3]),
    ((0.95, 0.62, 0.6, 0.61, 0.5), [0, 1, 2, 3]),  # beside the best, who is far above, 0.5 would not stand out
    ((0.9, 0.45), [0, 1]),
])  # fmt: skip
def test_who_is_bad_is_left_out(right, stay, clients):
    method = World(plain_net, clients).federation(FedDF, drop_worst=True).method
    assert left(right, 3) == stay
    assert method.kept(torch.tensor(right, dtype=torch.float64)).nonzero().flatten().tolist() == stay


@pytest.mark.parametrize("right", [(0.1, 0.2, 0.3), (0.7, 0.7, 0.7, 0.7, 0.7, 0.7), (0.9,), (0.1,)])
def test_where_there_is_nobody_to_choose_everybody_stays(right, clients):
    """All below chance, all alike but for rounding, one alone: the authors' rule would leave nobody."""
    method = World(plain_net, clients).federation(FedDF, drop_worst=True).method
    assert method.kept(torch.tensor(right, dtype=torch.float64)).tolist() == [1] * len(right)


def test_who_is_left_out_is_neither_in_the_mean_nor_a_teacher(clients):
    fed = World(plain_net, clients).federation(FedDF, drop_worst=True, **FAST)
    model, x = fed.method.model, clients.public.x
    good = [model.init(seed) for seed in (1, 2)]
    for step in range(60):  # they learn the public samples, and the third their opposite
        batch = Batch(x, clients.public.y, None, torch.tensor(step))
        good = [w - 0.5 * model.grad(w, batch)[0] for w in good]
    bad = opposite(model, 3 * good[0])
    samples = torch.tensor([5, 7, 90])
    same(refined(fed, [*good, bad], samples), refined(fed, good, samples[:2]))
    keeping = World(plain_net, clients).federation(FedDF, **FAST)
    assert differs(refined(keeping, [*good, bad], samples), refined(keeping, good, samples[:2]))


def test_labels_are_read_where_somebody_is_left_out_and_nowhere_else(clients):
    public = dataclasses.replace(clients.public, y=torch.full_like(clients.public.y, -1), labelled=False)
    world, unlabelled = World(plain_net, clients), dataclasses.replace(clients, public=public)
    same(World(plain_net, unlabelled).run(FedDF, **FAST).server, world.run(FedDF, **FAST).server)
    with pytest.raises(Problem, match="FedDF needs labelled public samples"):
        world.federation(FedDF, unlabelled, drop_worst=True)


# ---------------------------------------------------------------------- the rest


def test_one_model_each_way_read_one_by_one(clients):
    """Beside it the number of samples, which the mean is weighted by; public samples are not sent to clients."""
    world = World(norm_net, clients)
    size = len(flat(world.net()))
    fed = world.run(FedDF, **FAST)
    assert per_client(fed) == (size, size + 1)
    assert fed.traffic.up_mean == 0
    assert fed.traffic.extra == {}


def test_a_newcomer_gets_the_server_s_model(clients):
    fed = World(plain_net, clients).run(FedDF, **FAST)
    (w,) = fed.server
    assert torch.equal(fed.method.newcomer(fed.server).shared, w)
    assert torch.equal(fed.method.global_model(fed.server), w)
    assert torch.equal(personal(fed)[NEVER], w)
    check_no_alias(fed)


def test_refuses_what_it_cannot_use(clients):
    world = World(plain_net, clients)
    with pytest.raises(Problem, match="feddf compares probabilities of classes, and this task is multilabel"):
        FedDF(Model(plain_net, task=Multilabel(3)))
    with pytest.raises(Problem, match="distil_steps must be at least 0"):
        world.federation(FedDF, distil_steps=-1)
    with pytest.raises(Problem, match="ensemble must be one of avg_logits, avg_losses, avg_probs"):
        world.federation(FedDF, ensemble="vote")
    with pytest.raises(Problem, match="FedDF needs public samples, and there are none"):
        world.federation(FedDF, dataclasses.replace(clients, public=None))
