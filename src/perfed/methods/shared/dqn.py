"""Double deep Q-learning of whom to choose: a network of two layers, its slower copy, and a memory of what was tried.

Van Hasselt, Guez, Silver: Deep Reinforcement Learning with Double Q-learning. AAAI 2016. https://arxiv.org/abs/1509.06461

An agent is a dict of tensors and counters. What it sees is a table: a row for the whole, and one for each that it may
choose. It learns in episodes; in each of their steps it moves: it chooses one, and sees another table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad

from perfed.core.optim import adam, adam_start
from perfed.core.random import SELECT, derive, uniform

RATE, BATCH, COPY_EVERY = 1e-3, 32, 10  # of Adam; moves in a step of learning; steps between two copies
MEMORY = 2000  # moves that are kept
CURIOUS, LEAST_CURIOUS = 0.95, 0.01  # a move is a random one with the probability 0.95^episode, and never less
Agent = dict[str, Any]


def values(q: Tensor, states: Tensor, actions: int) -> Tensor:
    """Return what each action is worth: [..., actions].

    Args:
        q: the network's weights as one vector.
        states: [..., inputs].
        actions: how many there are.
    """
    inputs = states.shape[-1]
    hidden = (len(q) - actions) // (inputs + 1 + actions)
    first, b1, second, b2 = q.split([hidden * inputs, hidden, actions * hidden, actions])
    return F.linear(F.linear(states, first.view(hidden, inputs), b1).relu(), second.view(actions, hidden), b2)


def new_agent(key: Tensor, table: Tensor, hidden: int, moves: int) -> Agent:
    """Return an agent that knows nothing, with weights as PyTorch draws those of `Linear`.

    Args:
        key: one key.
        table: one of the form that it will see.
        hidden: width of the hidden layer.
        moves: how many there will be.
    """
    inputs, actions, moves = table.numel(), len(table) - 1, min(max(moves, 1), MEMORY)
    draw = lambda number, count, fan: (2 * uniform(derive(key, number), (count,), torch.float64) - 1) / math.sqrt(fan)
    q = torch.cat([draw(0, hidden * (inputs + 1), max(inputs, 1)), draw(1, actions * (hidden + 1), hidden)]).to(table)
    kept = {"state": (inputs,), "action": (), "reward": (), "after": (inputs,), "over": ()}
    memory = {name: table.new_zeros(moves, *shape) for name, shape in kept.items()}
    seen = {"first": table, "state": table, "action": table.new_zeros(()), "after": table}
    counters = {"met": 0, "episode": 0, "step": 0, "moved": 0}
    return {"q": q, "slow": q, "adam": adam_start(q), "kept": memory} | seen | counters


def shown(agent: Agent, table: Tensor, q: Tensor | None = None) -> Agent:
    """Return the agent before its first episode, which begins with this `table`, as all do; with the weights `q`."""
    return agent | {"first": table, "state": table, "after": table} | ({} if q is None else {"q": q, "slow": q})


def moved(agent: Agent, actions: Tensor, rows: Tensor, learns: bool) -> Agent:
    """Return the agent when it sees another table.

    Args:
        agent: it stays as it is.
        actions: those that were carried out.
        rows: the new first row of the table, and those of the actions.
        learns: it is being trained: after the first step of an episode, which is not its own, `learned` follows.
    """
    places = torch.cat([actions.new_zeros(1), 1 + actions])
    after = agent["after"].index_copy(0, places, rows)
    if not learns or agent["step"] == 0:
        return agent | {"after": after, "step": agent["step"] + learns}
    return agent | {"state": agent["after"], "action": actions[0].to(after), "after": after, "moved": 1}


def choice(agent: Agent, among: Sequence[int], count: int) -> list[int]:
    """Return the `count` actions that are worth most `among` some; all, where there are not more."""
    table = agent["after"]
    value = values(agent["q"], table.flatten(), len(table) - 1)[list(among)]
    return [among[place] for place in value.topk(min(count, len(among))).indices.tolist()]


def trial(agent: Agent, key: Tensor, among: Sequence[int]) -> list[int]:
    """Return one action to learn from, `among` some: drawn by a `key`, or the best; none, where there are none."""
    if among and uniform(key, ()) < max(CURIOUS ** agent["episode"], LEAST_CURIOUS):
        return [among[int(uniform(derive(key, 1), (), torch.float64) * len(among))]]
    return choice(agent, among, 1)


def learned(agent: Agent, seed: int, reward: float, over: bool, gamma: float) -> Agent:
    """Return the agent after it has kept its last move and taken a step of learning.

    Args:
        agent: it stays as it is.
        seed: what the moves of the step are drawn from.
        reward: of the move.
        over: it was the episode's last one; the next one begins with the first table.
        gamma: what the next reward counts.
    """
    move = {"state": agent["state"].flatten(), "action": agent["action"], "reward": reward}
    move |= {"after": agent["after"].flatten(), "over": float(over)}
    place = torch.tensor([agent["met"] % len(agent["kept"]["over"])], device=agent["q"].device)
    put = lambda rows, value: rows.index_copy(0, place, torch.as_tensor(value).to(rows)[None])
    kept, met = {name: put(rows, move[name]) for name, rows in agent["kept"].items()}, agent["met"] + 1
    key = derive(seed, SELECT, met)
    drawn = (uniform(key, (BATCH,), torch.float64) * min(met, len(kept["over"]))).long().to(place.device)
    g = slope(agent, {name: rows[drawn] for name, rows in kept.items()}, gamma)
    q, state = adam(agent["q"], agent["adam"], g, RATE)
    slow = q if met % COPY_EVERY == 0 else agent["slow"]
    agent = agent | {"q": q, "slow": slow, "adam": state, "kept": kept, "met": met, "moved": 0}
    if not over:
        return agent | {"step": agent["step"] + 1}
    return shown(agent, agent["first"]) | {"step": 0, "episode": agent["episode"] + 1}


def slope(agent: Agent, moves: dict[str, Tensor], gamma: float) -> Tensor:
    """Return the gradient of the Huber loss of some moves.

    The network says which action is best in the state after, its slower copy what that is worth.

    Args:
        agent: whose network it is.
        moves: rows of moves.
        gamma: what the next reward counts.
    """
    actions = len(agent["first"]) - 1
    best = values(agent["q"], moves["after"], actions).argmax(1, keepdim=True)
    later = values(agent["slow"], moves["after"], actions).gather(1, best).squeeze(1)
    target = moves["reward"] + gamma * (1 - moves["over"]) * later

    def loss(q: Tensor) -> Tensor:
        value = values(q, moves["state"], actions).gather(1, moves["action"].long()[:, None]).squeeze(1)
        return F.smooth_l1_loss(value, target)

    return grad(loss)(agent["q"])
