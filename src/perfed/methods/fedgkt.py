"""FedGKT: clients train extractors with a small head, the server a large network on what they extract; each teaches.

He, Annavaram, Avestimehr: Group Knowledge Transfer: Federated Learning of Large CNNs at the Edge. NeurIPS 2020.
https://arxiv.org/abs/2007.14513

After the authors' code (github.com/FedML-AI/FedML). The extractor is the body, the small head the head. A client sends
representations, logits and LABELS of all its training samples, in tables as long as the largest client's; the server
trains on them, client by client, and sends back its logits, which clients then learn from beside their labels. Models
are not averaged. A client predicts with its extractor and the server's network, as if that had its test samples, too;
`small` is its own network. Ours: logits are of the network after training (`as_released`: of the last epoch's steps);
clients' optimisers begin anew in each round; who has no logits yet learns from labels; Adam without AMSGrad.
"""

from dataclasses import dataclass

from torch import Tensor

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.further import further_model
from perfed.core.messages import Down, Up
from perfed.core.method import Method
from perfed.core.model import average
from perfed.core.optim import adam, adam_start
from perfed.methods.shared.transfer import batch_of, batches, classifier, divergence


@dataclass(frozen=True)
class FedGKT(Method):
    distillation: float = hyper(1.0, "weight of the server's logits in a client's loss; 0 is Local", at_least=0)
    temperature: float = hyper(3.0, "temperature of the logits", above=0)
    server_distils: bool = hyper(False, "the server learns from the clients' logits, too")
    server_epochs: int = hyper(20, "epochs of the server in a round", at_least=1, at_most=10_000, toy=2)
    server_batch: int = hyper(256, "samples of its step, all of one client", at_least=1, at_most=1_000_000, toy=8)
    server_lr: float = hyper(1e-3, "learning rate of Adam at the server", above=0)
    server_width: int = hyper(256, "width of its two hidden layers", at_least=1, at_most=1_000_000, toy=8)
    as_released: bool = hyper(False, "send the logits of the steps of the server's last epoch")

    category = "personalised models: knowledge distillation"
    averages = False
    own_networks = True

    def check(self):
        if (task := self.model.task).kind != "classification":
            raise Problem(f"fedgkt compares what networks say of classes, and this task is {task.kind}")
        if not len(self.model.body):
            raise Problem("fedgkt sends what enters the head, but this model learns nothing below its head")

    @further_model
    def large(self):
        return classifier((net.representation for net in self.networks), self.server_width, self.model.outputs)

    def init_server(self, clients):
        s = self.large.init(self.context.seed)
        return {"s": (s, adam_start(s)), "logits": s.new_zeros(clients, self.context.longest, self.model.outputs)}

    def init_client(self):
        return self.model.init(self.context.seed)

    def broadcast(self, server, ids):
        return Down(own=server["logits"][ids])

    def show(self, server, ids):
        return Down(shared=server["s"][0])

    def taught(self, model, theta, batch, teacher, labels, logits):
        def loss(theta, batch, train):
            out, fresh = model.apply(theta, batch.x, train, batch.weight, batch.key)
            each = labels * self.model.by_class(self.model.task.losses(out, batch.y), batch.y)
            return average(each + logits * divergence(out, teacher, self.temperature), batch.weight), fresh

        return model.grad(theta, batch, loss)[:2]

    def distilled(self, w, batch, given):
        return self.taught(self.model, w, batch, given["logits"][batch.index], 1, given["weight"])

    def extracted(self, batch, w):
        logits, z, _ = self.model.features(w, batch)
        return {"z": z, "logits": logits, "y": batch.y}

    def local(self, client, down, data):
        known = (down.own != 0).any().to(down.own.dtype)  # the server has logits of this client
        w = self.descend(client, data, self.distilled, {"logits": down.own, "weight": known * self.distillation})
        return w, Up(own=data.map(self.extracted, w) | {"real": data.mask()})

    def aggregate(self, server, cohort):
        return server

    def learn(self, carry, batch, given):
        (s, state, t, sent), (own, order) = carry, given
        batch, rows = batch_of(own, order, t, batch.key)
        weights = (self.distillation, 1) if self.server_distils else (1, 0)  # of labels and logits
        g, _ = self.taught(self.large, s, batch, own["logits"][rows], *weights)
        sent = sent.index_copy(0, rows, self.large.apply(s, batch.x)[0]) if self.as_released else sent
        return *adam(s, state, g + 1e-4 * s, self.server_lr), t + 1, sent  # with L2 decay, as in the code

    def refine(self, server, cohort, public):
        own, order = batches(cohort.own, self.server_batch)
        carry, steps = (*server["s"], order.new_zeros(()), own["logits"]), len(order) * self.server_epochs
        s, state, _, logits = public.fold(self.learn, carry, (own, order), steps=steps)
        logits = (logits if self.as_released else self.large.apply(s, own["z"])[0]).view_as(cohort.own["logits"])
        return {"s": (s, state), "logits": server["logits"].index_copy(0, cohort.ids, logits)}

    def personalise(self, client, down, data):
        return {"personal": {"w": client, "s": down.shared}, "small": client}

    def predict(self, model, x):
        if isinstance(model, Tensor):
            return self.model.apply(model, x)[0]
        return self.large.apply(model["s"], self.model.features(model["w"], x)[1])[0]
