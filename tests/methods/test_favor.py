"""FAVOR: an agent that has learned by deep Q-learning chooses who takes part."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from reference import ORDER, World, average, close, flat, norm_net, personal, plain_net, same
from safetensors.torch import save_file
from torch import nn

import perfed
from perfed.contract import toy
from perfed.core.clients import Split
from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.core.random import SELECT, derive, uniform
from perfed.core.task import Regression
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.federation.faults import Faults
from perfed.federation.federation import Federation
from perfed.federation.system import System
from perfed.methods.favor import FAVOR
from perfed.methods.fedavg import FedAvg
from perfed.methods.shared import agents
from perfed.methods.shared.dqn import choice, learned, moved, new_agent, shown, slope, trial, values
from perfed.methods.shared.principal import coordinates, principal, space_of


@pytest.fixture(autouse=True)
def no_agents(tmp_path, monkeypatch):
    """No agent comes along unless a test puts one there."""
    monkeypatch.setattr(agents, "FOLDER", tmp_path)


def federation(
    world, kind=FAVOR, cohort=2, engine=Sequential, seed=ORDER, clients=None, system=None, faults=None, **more
):
    method = kind(
        Model(world.build, dtype=torch.float64), **(world.settings | ({"units": 8} if kind is FAVOR else {}) | more)
    )
    job = Job(method, clients or world.clients, seed, cohort)
    return Federation(engine(job), system=system or System(), faults=faults or Faults())


def public_accuracy(world, net):
    x, y = world.clients.public.x, world.clients.public.y
    return float((net.eval()(x).argmax(1) == y).double().mean())


# ---------------------------------------------------------------------- the whole method


class Learner:
    """Double Q-learning with modules and optimisers of PyTorch; what it draws out of its memory is shared."""

    def __init__(self, q, inputs, units, actions):
        self.net = nn.Sequential(nn.Linear(inputs, units), nn.ReLU(), nn.Linear(units, actions)).double()
        nn.utils.vector_to_parameters(q.clone(), self.net.parameters())
        self.slow = nn.Sequential(nn.Linear(inputs, units), nn.ReLU(), nn.Linear(units, actions)).double()
        self.copy()
        self.adam, self.memory = torch.optim.Adam(self.net.parameters(), 1e-3), []

    def copy(self):
        self.slow.load_state_dict(self.net.state_dict())

    def learn(self, state, action, reward, after, over, gamma=0.95):
        self.memory.append((state, action, reward, after, over))
        key = derive(ORDER, SELECT, len(self.memory))
        losses = []
        for place in (uniform(key, (32,), torch.float64) * len(self.memory)).long().tolist():
            state, action, reward, after, over = self.memory[place]
            with torch.no_grad():
                target = reward if over else reward + gamma * self.slow(after)[self.net(after).argmax()]
            losses.append(nn.functional.huber_loss(self.net(state)[action], torch.as_tensor(target).double()))
        self.adam.zero_grad()
        torch.stack(losses).mean().backward()
        self.adam.step()
        if len(self.memory) % 10 == 0:
            self.copy()

    @property
    def q(self):
        return nn.utils.parameters_to_vector(self.net.parameters()).detach()


def portrayed(nets, first):
    """What makes a table of networks: principal components by numpy, of the models of all clients."""
    rows = np.stack([flat(net).numpy() for net in nets])
    mean = rows.mean(0)
    axes = np.linalg.svd(rows - mean, full_matrices=False)[2][: len(nets) - 1]
    axes[(flat(first).numpy() - mean) @ axes.T < 0] *= -1
    place = lambda net: torch.from_numpy((flat(net).numpy() - mean) @ axes.T)
    size = (sum(float((place(net) ** 2).sum()) for net in (first, *nets)) / (len(nets) + 1) / len(axes)) ** 0.5
    return lambda net: place(net) / size


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, clients):
    """Two episodes of training and two rounds of use; whom the agent tries is taken from the run."""
    world, steps, episodes, target = World(build, clients, momentum=0.9, lr=0.1), 6, 2, 0.6
    fed = federation(world, episodes=episodes, steps=steps, target=target)
    first, N, round, ends = world.net(), 5, 1, []
    learner = Learner(fed.server["agent"]["q"], 24, 8, N)
    assert fed.step() == [0, 1, 2, 3, 4]
    close(fed.server["w"], flat(first))  # nothing comes of the first round but portraits
    nets = [world.train(first, world.batches(i, 1)) for i in range(N)]
    place = portrayed(nets, first)
    start = torch.stack([place(net) for net in (first, *nets)])
    same(fed.server["agent"]["first"], start)

    def train(w, table, ids, round):
        nets = [world.train(w, world.batches(i, round)) for i in ids]
        w, table = average(nets, [world.count(i) for i in ids]), table.clone()
        table[0] = place(w)
        for i, net in zip(ids, nets, strict=True):
            table[1 + i] = place(net)
        return w, table

    for _ in range(episodes):
        ids, round = fed.step(), round + 1
        assert len(ids) == 2
        w, table = train(first, start, ids, round)
        for step in range(1, steps + 1):
            (client,), round = fed.step(), round + 1
            w, after = train(w, table, [client], round)
            accuracy = public_accuracy(world, w)
            over = accuracy >= target or step == steps
            learner.learn(table.flatten(), client, 64 ** (accuracy - target) - 1, after.flatten(), over)
            close(fed.server["w"], flat(w))
            same(fed.server["agent"]["after"], after)
            table = after
            if over:
                ends.append(accuracy >= target)
                break
    w, table = first, start
    for _ in range(2):
        with torch.no_grad():
            best = learner.net(table.flatten()).topk(2).indices.tolist()
        ids, round = fed.step(), round + 1
        assert ids == sorted(best)
        # Adam divides by the root of squares: where a gradient is nearly 0, rounding is in all digits.
        assert (fed.server["agent"]["q"] - learner.q).norm() < 1e-8 * learner.q.norm()
        w, table = train(w, table, ids, round)
    close(fed.server["w"], flat(w))
    for theta in personal(fed):
        close(theta, flat(w))
    assert {*ends} == {True, False}  # an episode ended at the target, and one with its last step


def test_with_everybody_in_every_round_it_is_fedavg(clients):
    world = World(norm_net, clients, momentum=0.9)
    favor, avg = federation(world, cohort=5), federation(world, FedAvg, cohort=5)
    for _ in range(3):
        assert favor.step() == avg.step()
    same(favor.server["w"], avg.server)
    assert favor.method.notes(favor.server)["phase"] == "drawing"


# ---------------------------------------------------------------------- rounds


def stages(fed, rounds):
    """Who takes part, and in which phase, until so many rounds are done."""
    return [(fed.server["stage"], fed.step()) for _ in range(rounds)]


def test_rounds_are_profiling_then_episodes_then_choosing(clients):
    fed = federation(World(plain_net, clients, epochs=1), episodes=2, steps=3, target=1.0)
    found = stages(fed, 11)
    assert [phase for phase, _ in found] == ["profiling"] + ["training"] * 8 + ["training", "choosing"]
    assert [len(ids) for _, ids in found] == [5, 2, 1, 1, 1, 2, 1, 1, 1, 2, 2]
    assert fed.method.notes(fed.server) == {"phase": "choosing", "episodes": 2}


def test_an_episode_begins_with_the_initial_model(clients):
    fed, begun = federation(World(plain_net, clients), episodes=3, steps=2, target=1.0), []
    start = fed.server["w"].clone()
    fed.step()
    for _ in range(11):
        fed.begin()
        begun.append(torch.equal(fed.server["w"], start))
        table = fed.server["agent"]["after"], fed.server["agent"]["first"]
        assert torch.equal(*table) == begun[-1]
        for request in fed.requests():
            fed.receive(request, fed.engine.exchange([request])[0])
        fed.end()
    assert begun == [True, False, False] * 3 + [True, False]  # the last one is the first of those that count


def test_an_episode_ends_at_the_target(clients):
    fed = federation(World(plain_net, clients, epochs=1), episodes=3, steps=4, target=1e-9)
    assert [len(ids) for _, ids in stages(fed, 8)] == [5, 2, 1, 2, 1, 2, 1, 2]
    assert fed.server["agent"]["kept"]["over"][:3].tolist() == [1, 1, 1]


def test_without_more_being_asked_for_there_are_two_episodes(clients):
    fed = federation(World(plain_net, clients, epochs=1), steps=1)
    assert [phase for phase, _ in stages(fed, 7)] == ["profiling"] + ["training"] * 5 + ["choosing"]


@pytest.mark.parametrize(("accuracy", "target", "reward"), [(0.5, 1.0, -0.875), (0.8, 0.8, 0.0), (0.25, 0.75, -0.875)])
def test_the_reward_is_64_to_the_power_of_what_is_missing(accuracy, target, reward, clients):
    fed = federation(World(plain_net, clients), target=target, episodes=1)
    stages(fed, 3)
    assert fed.server["agent"]["moved"] == 1
    server = fed.server | {"accuracy": torch.tensor(accuracy, dtype=torch.float64)}
    kept = fed.method.at(round=4).before_round(server, fed.known)["agent"]["kept"]
    assert float(kept["reward"][0]) == pytest.approx(reward)
    assert bool(kept["over"][0]) == (accuracy >= target)


def test_accuracy_is_that_of_public_samples(clients):
    """Public code takes test samples."""
    world = World(plain_net, clients)
    poisoned = replace(clients, test=replace(clients.test, y=(clients.test.y + 1) % 3))
    feds = [federation(world, clients=each) for each in (clients, poisoned)]
    for fed in feds:
        stages(fed, 6)
        net = world.net()
        net.load_state_dict(fed.method.model.state_dict(fed.server["w"]))
        assert float(fed.server["accuracy"]) == pytest.approx(public_accuracy(world, net))
    assert torch.equal(feds[0].server["agent"]["q"], feds[1].server["agent"]["q"])


def test_who_cannot_be_asked_is_not_chosen(clients):
    """The engine leaves others out: who is chosen in vain would be missing in the cohort."""
    machines = System(availability=0.5)
    fed = federation(World(plain_net, clients, epochs=1), system=machines, episodes=1, steps=2)
    for round in range(1, 16):
        there, ids = machines.available(ORDER, round, range(5)), fed.step()
        assert {*ids} <= {*there}
        assert fed.server["stage"] != "choosing" or len(ids) == min(2, len(there))
    assert fed.server["stage"] == "choosing"


def test_a_client_that_is_lost_is_no_step(clients):
    """Nor is one that was lost in the first round left out: its portrait is that of the initial model."""
    fed = federation(World(plain_net, clients, epochs=1), faults=Faults(dropout=0.4), episodes=1, steps=6, target=1.0)
    fed.step()
    lost, first = fed.answers.lost, fed.server["agent"]["first"]
    assert lost
    assert all(torch.equal(first[1 + id], first[0]) == (id in lost) for id in range(5))
    answered = 0
    while fed.server["stage"] == "training":
        answered += bool(fed.step())
    assert answered == 1 + 6 + 1  # drawn clients, six steps, and the first round of those that count
    assert fed.round > 9


# ---------------------------------------------------------------------- the agent


def agent_with(table=None, units=5, moves=30):
    table = (
        torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) if table is None else table
    )
    return new_agent(derive(1), table, units, moves)


def test_values_are_those_of_two_layers_with_relu_between_them():
    agent, states = agent_with(), torch.randn(7, 8, dtype=torch.float64)
    net = Learner(agent["q"], 8, 5, 3).net
    same(values(agent["q"], states, 3), net(states).detach())
    drawn = new_agent(derive(2), torch.zeros(101, 50, dtype=torch.float64), 40, 1)["q"]
    net = Learner(drawn, 5050, 40, 100).net
    for layer, fan in ((net[0], 5050), (net[2], 40)):
        for weights in (layer.weight.detach(), layer.bias.detach()):
            assert 0.9 < float(weights.abs().max()) * fan**0.5 <= 1
            assert abs(float(weights.mean())) * fan**0.5 < 0.25


def test_the_network_says_which_action_is_best_and_its_copy_what_it_is_worth():
    """Public code calls double what takes both from the copy."""
    agent = agent_with()
    agent = agent | {"slow": agent["q"].flip(0)}
    moves = {name: torch.randn(6, 8, dtype=torch.float64) for name in ("state", "after")}
    zeros = torch.zeros(6, dtype=torch.float64)
    moves |= {"action": torch.tensor([0, 1, 2, 0, 1, 2]), "reward": zeros, "over": zeros}
    q = agent["q"].clone().requires_grad_(True)
    best = values(agent["q"], moves["after"], 3).argmax(1)
    worth = values(agent["slow"], moves["after"], 3)
    assert (best != worth.argmax(1)).any()
    target = 0.9 * worth[torch.arange(6), best]
    value = values(q, moves["state"], 3)[torch.arange(6), moves["action"]]
    nn.functional.huber_loss(value, target).backward()
    same(slope(agent, moves, 0.9), q.grad)
    over = moves | {"over": zeros + 1}
    assert torch.equal(slope(agent, over, 0.9), slope(agent, over, 0.0))  # nothing comes after the last step


def test_the_copy_is_renewed_every_ten_steps():
    agent, renewed = agent_with(), []
    for _ in range(25):
        agent = learned(agent | {"moved": 1}, 0, -0.5, False, 0.95)
        renewed.append(torch.equal(agent["slow"], agent["q"]))
    assert [place for place, yes in enumerate(renewed, 1) if yes] == [10, 20]


def test_the_memory_keeps_the_last_moves():
    agent = agent_with(moves=3)
    for number in range(5):
        agent = learned(agent, 0, float(number), False, 0.95)
    assert agent["kept"]["reward"].tolist() == [3, 4, 2]
    assert len(new_agent(derive(1), torch.zeros(4, 2), 5, 10**6)["kept"]["reward"]) == 2000


def test_a_move_is_what_was_seen_and_done_and_what_came_of_it():
    agent = shown(agent_with(), table := torch.arange(8.0, dtype=torch.float64).view(4, 2))
    rows = torch.tensor([[-1.0, -2], [-3, -4]], dtype=torch.float64)
    agent = moved(agent, torch.tensor([2]), rows, True)  # the drawn clients: not the agent's doing
    assert (agent["moved"], agent["step"]) == (0, 1)
    table = torch.cat([rows[:1], table[1:3], rows[1:]])
    assert torch.equal(agent["after"], table)
    agent = learned(moved(agent, torch.tensor([0]), -rows, True), 0, -0.5, False, 0.95)
    assert (agent["moved"], agent["step"]) == (0, 2)
    assert torch.equal(agent["kept"]["state"][0], table.flatten())
    assert torch.equal(agent["kept"]["after"][0], torch.cat([-rows, table[2:]]).flatten())
    assert int(agent["kept"]["action"][0]) == 0


def test_all_trials_are_random_at_first_and_few_later():
    agent = agent_with()
    (best,) = choice(agent, range(3), 1)
    for episode, curiosity in ((0, 1), (20, 0.95**20), (500, 0.01)):
        count = Counter(trial(agent | {"episode": episode}, derive(4, number), range(3))[0] for number in range(1500))
        for action in range(3):
            assert count[action] / 1500 == pytest.approx(curiosity / 3 + (action == best) * (1 - curiosity), abs=0.04)
            assert count[action] > 0


def test_those_with_the_largest_values_are_chosen():
    agent = agent_with()
    value = values(agent["q"], agent["after"].flatten(), 3).tolist()
    order = sorted(range(3), key=lambda action: -value[action])
    assert choice(agent, [0, 1, 2], 2) == order[:2]
    assert choice(agent, [id for id in range(3) if id != order[0]], 1) == order[1:2]
    assert choice(agent, [1], 3) == [1]
    assert choice(agent, [], 2) == trial(agent, derive(1), []) == []


# ---------------------------------------------------------------------- principal components


def test_components_are_those_of_numpy():
    rows = torch.randn(6, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    mean, directions = principal(rows, 5)
    same(mean, rows.mean(0))
    same(directions @ directions.T, torch.eye(5, dtype=torch.float64))
    spread = np.linalg.svd((rows - mean).numpy(), compute_uv=False)[:5]
    same(((rows - mean) @ directions.T).norm(dim=0), torch.from_numpy(spread))
    same((rows - mean) @ directions.T @ directions + mean, rows)  # five of them say all about six rows


def test_a_space_does_not_depend_on_rounding():
    rows = torch.randn(6, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    space, places = space_of(rows, 4)
    assert (places[0] >= 0).all()
    assert float((places**2).mean()) == pytest.approx(1)
    same(coordinates(space, rows), places)
    other = space_of(rows + 1e-9 * torch.randn(6, 40, dtype=torch.float64), 4)[1]
    assert (other - places).norm() < 1e-6 * places.norm()


# ---------------------------------------------------------------------- an agent that comes along


def saved_agent(world, path, **more):
    """The file of an agent that was made for this federation, with weights that nobody would draw."""
    fed = federation(world, **more)
    fed.step()
    q = torch.linspace(-1, 1, len(fed.server["agent"]["q"])).half()
    save_file({"q": q, "fingerprint": fed.server["agent"]["first"].float()}, path / "some.safetensors")
    return q.double()


@pytest.mark.parametrize("engine", [Sequential, Vectorised])
def test_an_agent_is_used_at_once_where_it_knows_the_federation(engine, clients, tmp_path):
    world = World(norm_net, clients)
    q = saved_agent(world, tmp_path)
    fed = federation(world, engine=engine)
    found = stages(fed, 3)
    assert [phase for phase, _ in found] == ["profiling", "choosing", "choosing"]
    assert torch.equal(fed.server["agent"]["q"], q)
    assert found[1][1] == sorted(choice(fed.server["agent"] | {"after": fed.server["agent"]["first"]}, range(5), 2))
    assert fed.traffic.up == (5 + 2 + 2) * 8 * (1 + fed.method.model.size)


def test_an_agent_is_not_used_elsewhere(clients, tmp_path):
    """Another seed, other samples, another rate, another network of the agent: it has nothing to say there."""
    world = World(plain_net, clients)
    saved_agent(world, tmp_path)
    swapped = Split(clients.train.x.flip(0), clients.train.y.flip(0), clients.train.size)
    others = [dict(seed=ORDER + 1), dict(clients=replace(clients, train=swapped)), dict(lr=0.051), dict(units=9)]
    others += [dict(components=2), dict(clients=toy.toy_clients((23, 7, 41, 3))), dict(episodes=2)]
    for other in others:
        fed = federation(world, **other)
        fed.step()
        assert fed.server["stage"] == "training", other
    same_again = federation(world)
    same_again.step()
    assert same_again.server["stage"] == "choosing"


@pytest.mark.slow
def test_the_agent_that_comes_along_knows_the_default_federation(tmp_path, monkeypatch):
    monkeypatch.undo()
    for number, (settings, phase) in enumerate(
        [({}, "choosing"), ({"seed": 1}, "training"), ({"lr": 0.11}, "training")]
    ):
        settings = settings | {"engine": "sequential", "baseline": False, "save_models": "none", "rounds": 2}
        run = perfed.run("favor", participation=0.2, out=tmp_path / str(number), **settings)
        assert run.folder.method("favor").server()["stage"] == phase


# ---------------------------------------------------------------------- bytes, newcomers, refusals


def test_a_model_down_and_a_model_up_with_its_samples(clients):
    world = World(norm_net, clients)
    fed = federation(world, episodes=1, steps=2, target=1.0)
    size = 8 * len(flat(world.net()))
    count = sum(len(ids) for _, ids in stages(fed, 6))
    assert count == 5 + (2 + 1 + 1) + 2 + 2  # what trains the agent is counted, too
    assert (fed.traffic.down, fed.traffic.up, fed.traffic.up_mean) == (count * size, count * (size + 8), 0)


def test_a_newcomer_gets_the_model(clients):
    fed = federation(World(plain_net, clients))
    stages(fed, 2)
    assert fed.method.newcomer(fed.server).shared is fed.server["w"]


def test_tasks_without_accuracy_are_refused():
    with pytest.raises(Problem, match="favor's reward is accuracy, and this task is regression"):
        FAVOR(Model(plain_net, dtype=torch.float64, task=Regression(3)))
