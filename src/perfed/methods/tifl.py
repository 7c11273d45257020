"""TiFL: clients are sorted into tiers by how long they take, and the clients of a round are all of one tier.

After the description of Chai, Ali, Zawad, Truex, Anwar, Baracaldo, Zhou, Ludwig, Yan, Cheng: TiFL: A Tier-based
Federated Learning System. HPDC 2020. https://arxiv.org/abs/2001.09249

Our own choices: a profiling round is a round of FedAvg with everybody; without such rounds, or without a simulated
clock, a client's time is its number of samples. Every I rounds all clients say how good the new model is on validation
samples (who has none: on training samples), and the server sees each tier's mean. `credits`, which the authors leave to
the user, have no limit; when no tier has one left, each gets one more. All policies but adaptive have odds that stay.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from perfed.core.fields import hyper
from perfed.core.messages import Down, Up
from perfed.core.method import Method
from perfed.core.random import COHORT, SELECT, choose, derive
from perfed.core.rounds import Phase
from perfed.methods.shared.goodness import held_out
from perfed.methods.shared.tiers import credits_of, drawn_tier, first_odds, odds_by_accuracy, seconds_of, sorted_into


@dataclass(frozen=True)
class TiFL(Method):
    tiers: int = hyper(
        5, "number of tiers, from fast to slow, at most one for each client; 1 is FedAvg", at_least=1, at_most=1_000
    )
    policy: Literal["adaptive", "slow", "uniform", "random", "fast"] = hyper("adaptive", "how a round's tier is drawn")
    profiling: int = hyper(1, "rounds at the start in which all clients are timed", at_least=0, at_most=1_000)
    timeout: float = hyper(0.0, "T_max in simulated seconds: who is never faster is left out (0: nobody)", at_least=0)
    interval: int = hyper(10, "rounds I between two looks at the tiers' accuracies", at_least=1, at_most=1_000_000)
    credits: int = hyper(0, "rounds in which a tier may be drawn (0: any number)", at_least=0, at_most=1_000_000)
    credits_by: Literal["equal", "speed"] = hyper("equal", "credits of slow tiers: as many, or in proportion to speed")

    evaluates = "global"
    category = "global model: client selection"

    def check(self):
        first_odds(self.policy, self.tiers)  # which not every policy has

    @property
    def groups(self):
        return min(self.tiers, self.context.population or self.tiers)  # a tier has a client

    def init_server(self, clients):
        w, odds = self.model.init(self.context.seed), first_odds(self.policy, self.groups).to(self.model.device)
        endless, nobody = torch.full_like(odds, math.inf), odds.new_zeros(clients)
        about = {"odds": odds, "credits": endless, "accuracy": -endless, "now": 0}  # `now`: the tier of the round
        return {"w": w, "latency": nobody, "tier": nobody.long()} | about

    def before_round(self, server, info):
        done, key = self.context.round - 1, derive(self.context.seed, SELECT, self.context.round)
        if min(self.profiling, 1) <= done <= self.profiling:
            server = server | self.timed(server["latency"], info, done)
        if done < self.profiling:
            return server
        now, credits = drawn_tier(key, server["odds"], server["credits"], server["tier"][info.available])
        return server | {"now": now, "credits": credits}

    def timed(self, latency, info, done):
        latency = latency + seconds_of(info, done, self.timeout).to(latency)
        tier = sorted_into(self.groups, latency, info.able, done * self.timeout)
        credits = credits_of(self.groups, self.credits, latency, tier, self.credits_by == "speed")
        return {"latency": latency, "tier": tier, "credits": credits}

    def phase(self, server):
        turn = self.context.round - self.profiling
        if turn < 1:
            return Phase("profiling", everybody=True)
        looks = self.policy == "adaptive" and self.groups > 1 and turn % self.interval == 0
        return Phase("rating", exchanges=2) if looks else Phase()

    def cohort_of(self, server, info):
        tier = server["tier"].tolist()
        members = [id for id in info.available if tier[id] == server["now"]]
        key, m = derive(self.context.seed, COHORT, self.context.round), min(self.context.cohort, len(members))
        cohort = [members[place] for place in choose(key, m, len(members))]  # of one tier those whom FedAvg would draw
        return [cohort, [id for id in info.available if tier[id] >= 0]] if self.context.phase == "rating" else cohort

    def broadcast(self, server, ids):
        return Down(shared=server["w"], own=server["tier"][ids] if self.context.exchange else ())

    def local(self, client, down, data):
        if self.context.exchange == 0:
            return client, Up(mean=self.descend(down.shared, data) - down.shared)
        score, count = held_out(self, down.shared, data)
        return client, Up(mean=score, weight=count, group=down.own)

    def aggregate(self, server, cohort):
        if self.context.exchange == 0:
            return server | {"w": server["w"] + cohort.mean}
        before, now = server["accuracy"], server["now"]  # -inf: nobody has said anything yet
        after, odds = torch.where(cohort.weight > 0, cohort.mean.to(before), before), server["odds"]
        if -math.inf < after[now] <= before[now]:
            odds = odds_by_accuracy(after, server["credits"])
        return server | {"accuracy": after, "odds": odds}

    def personalise(self, client, down, data):
        return down.shared

    def global_model(self, server):
        return server["w"]

    def notes(self, server):
        return {"tier_sizes": server["tier"].add(1).bincount(minlength=self.groups + 1)[1:].tolist()}
