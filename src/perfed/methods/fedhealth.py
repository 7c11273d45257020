"""FedHealth: FedAvg from a model of public samples; then clients tune the fully connected layers to their own data.

After the description of Chen, Qin, Wang, Yu, Gao: FedHealth: A Federated Transfer Learning Framework for Wearable
Healthcare. IEEE Intelligent Systems 35(4), 2020. https://arxiv.org/abs/1907.09173

The server trains on labelled public samples for `warmup` steps, and FedAvg goes on from there. For an evaluation each
client tunes a copy of the global model: all but the linear layers (`tunes`) is frozen, and the loss is cross-entropy
plus k CORAL, the squared distance of two covariances of what enters the head, over 4 d^2: C_S of the public samples
under the global model, a constant that the server sends along, and C_T of the client's batch under its own model.
A batch has more samples there (`tune_batch`), as the covariance of a few says little; a batch of one has none, and no
CORAL. Where nothing is tuned below the head, CORAL has no gradient. Our own choices are all lengths, plain SGD with the
settings of training, and C_S measured after each round. `global` in the results is the model without tuning.
"""

from dataclasses import dataclass
from functools import cached_property

from torch import nn

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.messages import Down, Up
from perfed.core.method import FINE_TUNING, Method
from perfed.core.model import average
from perfed.methods.shared.coral import coral, covariance


@dataclass(frozen=True)
class FedHealth(Method):
    k: float = hyper(0.01, "weight of CORAL in tuning; 0 is tuning alone", at_least=0)
    warmup: int = hyper(100, "steps on the public samples before round 1; 0: none", at_least=0, at_most=1_000_000)
    tune_epochs: int = hyper(5, "epochs of tuning before a model is evaluated; 0: none", at_least=0, at_most=10_000)
    tune_batch: int = hyper(64, "samples per step of tuning", at_least=1, at_most=1_000_000_000)
    tunes: str = hyper("", "what is tuned: head, body, norm or a pattern (default: all linear layers)")

    evaluates = "adapted"
    category = "global model: transfer learning"
    public = "labelled"
    refine_before = True

    def check(self):
        if (task := self.model.task).kind == "next_token":
            raise Problem(f"fedhealth aligns what enters the head for a sample, and the task {task.kind} has tokens")
        self.model.part(self.tuned_part)  # refuses a pattern that matches nothing

    @cached_property
    def tuned_part(self):
        net = self.model.module(self.model.zeros())
        linear = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
        return self.tunes or ",".join(linear) or "head"

    def init_server(self, clients):
        (d,), w = self.model.representation, self.model.init(self.context.seed)
        return {"w": w, "C_S": w.new_zeros(d, d)}

    def features(self, batch, w):
        return self.model.features(w, batch)[1]

    def refine(self, server, cohort, public):
        w = server["w"]
        w = self.descend(w, public, steps=self.warmup) if cohort is None else w
        return {"w": w, "C_S": covariance(public.map(self.features, w))}

    def broadcast(self, server, ids):
        return Down(shared={"w": server["w"]})

    def show(self, server, ids):
        return Down(shared=server)

    def newcomer(self, server):
        return Down(shared=server)

    def local(self, client, down, data):
        w = down.shared["w"]
        return client, Up(mean=self.descend(w, data) - w)

    def aggregate(self, server, cohort):
        return {**server, "w": server["w"] + cohort.mean}

    def transfer(self, C_S, theta, batch, train):
        out, z, fresh = self.model.features(theta, batch, train)
        each = self.model.by_class(self.model.task.losses(out, batch.y), batch.y)
        return average(each, batch.weight) + self.k * coral(C_S, z, batch.weight), fresh

    def step(self, carry, batch, C_S):
        theta, state = carry
        g, fresh, _ = self.model.grad(theta, batch, lambda *about: self.transfer(C_S, *about))
        return self.update(self.model.part(self.tuned_part).only(fresh, theta), state, g, self.tuned_part)

    def tune(self, theta, C_S, data, epochs, stream=0):
        carry, batch_size = (theta, self.start(theta)), self.tune_batch
        return data.fold(self.step, carry, C_S, epochs=epochs, batch_size=batch_size, stream=stream)[0]

    def personalise(self, client, down, data):
        w, C_S = down.shared["w"], down.shared["C_S"]
        return {"personal": self.tune(w, C_S, data, self.tune_epochs), "global": w}

    def tuned(self, theta, client, down, data):
        return self.tune(theta, down.shared["C_S"], data, self.fine_tune, FINE_TUNING)

    def global_model(self, server):
        return server["w"]
