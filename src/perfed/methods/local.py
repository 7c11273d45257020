"""Local: every client trains alone, from the common initial model; nothing is sent.

The bar that a personalised method has to clear. A client trains in the rounds in which it would take part in a
federated run with the same seed, so it gets exactly as many local epochs as under the methods beside it.
"""

from dataclasses import dataclass

from perfed.core.messages import Down, Up
from perfed.core.method import Method


@dataclass(frozen=True)
class Local(Method):
    evaluates = "own"
    category = "baseline"
    averages = False
    own_networks = True

    def init_server(self, clients):
        return ()

    def init_client(self):
        return self.model.init(self.context.seed)

    def broadcast(self, server, ids):
        return Down()

    def local(self, client, down, data):
        return self.descend(client, data), Up()

    def aggregate(self, server, cohort):
        return server

    def personalise(self, client, down, data):
        return client
