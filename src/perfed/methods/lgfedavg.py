"""LG-FedAvg: the lower layers stay with the client, the head is shared; both are trained together.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: Think Locally, Act Globally: Federated Learning with
Local and Global Representations. 2020, Algorithm 1. https://arxiv.org/abs/2001.01523

FedPer the other way round: small messages, and clients may see different kinds of inputs. Starts from the common
initial model (the authors' code: from a FedAvg model of hundreds of rounds). Each client keeps its LATEST lower layers;
the authors' code keeps those of the round that was best on the client's test data, and averages uniformly.
"""

from dataclasses import dataclass

from perfed.core.fields import hyper
from perfed.methods.fedper import FedPer


@dataclass(frozen=True)
class LGFedAvg(FedPer):
    personal: str = hyper("body", "what stays with the client: body or a pattern of lower layers; 'none' is FedAvg")
