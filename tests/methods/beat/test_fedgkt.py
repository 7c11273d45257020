"""FedGKT against Local, on clients with the same classes: its server's network against the clients' small heads."""

import pytest
from beat import accuracy

pytestmark = pytest.mark.slow
# Five clients with 200 training samples each, extractors 784-32 with heads 32-10, one epoch a round as in the code; the
# server's network is 32-256-256-10.
ALIKE = {"partition": "iid", "clients": 5, "samples": 2000, "hidden": 32, "epochs": 1}
each_seed = pytest.mark.parametrize("seed", [0, 1])


def scores(method, seed, model="personal", **more):
    """Mean accuracy in rounds 6 to 10 and in rounds 16 to 20."""
    return [accuracy(method, seed, rounds, last=20, model=model, **ALIKE, **more) for rounds in ((6, 10), (16, 20))]


@each_seed
def test_the_servers_network_beats_the_small_head_and_at_first_local(seed):
    early, late = scores("fedgkt", seed)
    small, alone = scores("fedgkt", seed, model="small"), scores("local", seed)
    assert early > small[0] + 0.04
    assert late > small[1] + 0.02
    assert early > alone[0] + 0.02
    assert abs(late - alone[1]) < 0.02, "Local has caught up"


@each_seed
def test_fedavg_of_the_small_network_is_ahead_in_the_end(seed):
    assert scores("fedavg", seed)[1] > scores("fedgkt", seed)[1] + 0.02


@each_seed
def test_the_logits_that_are_sent_back_slow_clients_down(seed):
    """Without them each client trains alone, and both its own network and the server's are better."""
    for model in ("personal", "small"):
        alone = scores("fedgkt", seed, model=model, distillation=0.0)
        assert all(one > other - 0.005 for one, other in zip(alone, scores("fedgkt", seed, model=model), strict=True))
