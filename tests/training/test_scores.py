"""Macro-F1 and AUC: the numbers of scikit-learn, on every engine, where a run says they are."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from sklearn.metrics import f1_score, recall_score, roc_auc_score

import perfed
from perfed.contract import checks, toy
from perfed.core.clients import Clients, Split
from perfed.core.data import CHUNK
from perfed.core.full_scores import of_classes
from perfed.core.model import Model
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.engines.workers import Workers
from perfed.federation.federation import Federation, evaluate, step
from perfed.methods.fedavg import FedAvg
from perfed.studies import measures
from perfed.training.catalog import find

SIZES = (0, 1, 7, 40, 0, 3, 0)
ENGINES = {
    "workers": lambda m, c: Workers(Job(m, c, seed=5), workers=2),
    "vectorised": lambda m, c: Vectorised(Job(m, c, seed=5)),
    "vectorised in blocks": lambda m, c: Vectorised(Job(m, c, seed=5), block=2),
}


FULL = ("balanced_accuracy", "macro_f1", "auc", "macro_auc")


def expected(out, y, size):
    """The same from scikit-learn, client by client."""
    first, balanced, f1, auc, macro = 0, [], [], [], []
    for n in size:
        o, t, first = out[first : first + n].numpy(), y[first : first + n].numpy(), first + n
        f1.append(f1_score(t, o.argmax(1), average="macro", zero_division=0) if n else np.nan)
        auc.append(roc_auc_score(np.eye(o.shape[1])[t], o, average="micro") if n else np.nan)
        balanced.append(recall_score(t, o.argmax(1), labels=np.unique(t), average="macro") if n else np.nan)
        chance = np.float32(log_softmax(np.float64(o), axis=1))
        known = [c for c in np.unique(t) if len(np.unique(t)) > 1]
        macro.append(np.mean([roc_auc_score(t == c, chance[:, c]) for c in known]) if known else np.nan)
    scores = {"balanced_accuracy": balanced, "macro_f1": f1, "auc": auc, "macro_auc": macro}
    return {name: torch.tensor(np.array(values), dtype=torch.float64) for name, values in scores.items()}


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("ties", [False, True])
def test_scores_are_those_of_scikit_learn(classes, ties):
    draw = torch.Generator().manual_seed(classes)
    out, y = torch.randn(sum(SIZES), classes, generator=draw), torch.randint(classes, (sum(SIZES),), generator=draw)
    out = out.round() if ties else out
    assert checks.difference(of_classes(out, y, SIZES), expected(out, y, SIZES)) < 1e-12


def test_scores_by_hand():
    """One class never met and never predicted does not count; one predicted wrongly counts as 0."""
    out = torch.tensor([[3.0, 2.0, 0.0, 0.0], [3.0, 2.0, 1.0, 0.0]])
    found = of_classes(out, torch.tensor([0, 1]), [2])
    assert found["macro_f1"].item() == pytest.approx((2 / 3 + 0) / 2)
    # The right outputs are 3 and 2; the wrong ones 3, 2, 1, 0, 0, 0: of 12 pairs, 5 + 1/2 and 4 + 1/2 are in order.
    assert found["auc"].item() == pytest.approx(10 / 12)


def test_scores_of_extremes():
    out, y = torch.eye(3, dtype=torch.float64)[[0, 1, 2, 0]], torch.tensor([0, 1, 2, 0])
    assert of_classes(out, y, [4])["auc"].item() == of_classes(out, y, [4])["macro_f1"].item() == 1.0
    assert of_classes(-out, y, [4])["auc"].item() == 0.0
    assert of_classes(out * 0, y, [4])["auc"].item() == 0.5
    assert of_classes(out.where(out > 0, torch.nan), y, [1, 3])["auc"].isnan().all()
    assert of_classes(out[:0], y[:0], [0, 0])["auc"].isnan().all()


def test_whoever_always_says_the_frequent_class_is_no_better_than_chance():
    """97 of 100 samples are of one class, and the network always prefers it: micro-averaged AUC looks like success."""
    y = (torch.arange(100) >= 97).long()
    scores = of_classes(torch.tensor([[2.0, -2.0]]).expand(100, 2), y, [100])
    assert scores["balanced_accuracy"].item() == scores["macro_auc"].item() == 0.5
    assert scores["macro_f1"].item() < 0.5
    assert scores["auc"].item() > 0.95
    assert of_classes(torch.randn(4, 2), torch.zeros(4, dtype=torch.int64), [4])["macro_auc"].isnan().all()


def trained(engine, rounds=2):
    federation = Federation(engine)
    for cohort in toy.COHORTS[:rounds]:
        federation.step(cohort)
    return federation


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["fedavg", "ditto", "pfedme"])  # one model for all, one for each, two for each
def test_every_engine_finds_the_same(name, engine):
    make, clients = toy.maker(find(name), "norm"), toy.toy_clients()
    reference = trained(Sequential(Job(make(), clients, seed=5))).evaluate(full=True)
    federation = trained(ENGINES[engine](make(), clients))
    saved = {}
    try:
        found = federation.evaluate(saved.__setitem__, full=True)
        plain = federation.evaluate()
    finally:
        federation.engine.close()
    assert checks.difference(found.tables, reference.tables) < 1e-9
    assert set(found["personal"]["test"]) == {"loss", "accuracy", *FULL}
    assert set(plain["personal"]["test"]) == {"loss", "accuracy"}
    model, test = federation.method.model, clients.test
    for kind in found.models:
        rows = [test.x[a : a + n] for a, n in zip(test.start, test.size, strict=True)]
        out = torch.cat([model.apply(saved[id][kind], x)[0] for id, x in enumerate(rows)])
        ours = {key: found[kind]["test"][key] for key in FULL}
        assert checks.difference(ours, expected(out, test.y, test.size)) < 1e-9


def test_runs_in_one_batch_find_the_same():
    make, clients = toy.maker(find("ditto"), "norm"), toy.toy_clients()
    jobs = [Job(make(), clients, seed=seed) for seed in (0, 3)]
    engine, alone = Vectorised(*jobs), [Federation(Vectorised(job)) for job in jobs]
    batched = [Federation(engine, run) for run in range(2)]
    step(batched)
    for single in alone:
        single.step()
    for scores, single in zip(evaluate(batched, [None, None], full=True), alone, strict=True):
        assert checks.difference(scores.tables, single.evaluate(full=True).tables) < 1e-9
        assert "auc" in scores["personal"]["val"]


@pytest.mark.parametrize("sizes", [(4, 0, 2 * CHUNK + 3, 1, 9 * CHUNK, 0), (0, 0, 3), (5, 0)])
@pytest.mark.parametrize("shared", [True, False])
def test_clients_of_any_size(sizes, shared):
    """Several pieces, several passes, nobody."""
    whole, draw = toy.toy_clients((6,) * len(sizes)), torch.Generator().manual_seed(3)
    x = torch.randn(sum(sizes), toy.FEATURES, generator=draw, dtype=torch.float64)
    test = Split(x, torch.randint(0, 3, (len(x),), generator=draw), sizes)
    clients = Clients(whole.names, whole.train, Split(x[:0], test.y[:0], (0,) * len(sizes)), test, 3)
    make = FedAvg(Model(toy.plain_net, dtype=torch.float64), batch_size=5, fine_tune=0 if shared else 1, lr=0.01)
    federation, saved = Federation(Sequential(Job(make, clients))), {}
    found = federation.evaluate(saved.__setitem__, full=True)["personal"]["test"]
    rows = [x[a : a + n] for a, n in zip(test.start, sizes, strict=True)]
    out = torch.cat([make.model.apply(saved[id]["personal"], some)[0] for id, some in enumerate(rows)])
    assert checks.difference({k: found[k] for k in FULL}, expected(out, test.y, sizes)) < 1e-12


def test_a_method_that_predicts_in_its_own_way_is_scored_by_that():
    @dataclass(frozen=True)
    class Opposite(FedAvg):
        def predict(self, model, x):
            return -self.model.apply(model, x)[0]

    model, clients = Model(toy.plain_net, dtype=torch.float64), toy.toy_clients()
    usual, opposite = (
        Federation(Sequential(Job(kind(model), clients))).evaluate(full=True)["personal"]["test"]
        for kind in (FedAvg, Opposite)
    )
    assert torch.allclose(opposite["auc"], 1 - usual["auc"])
    assert not torch.allclose(opposite["loss"], usual["loss"])


# ---------------------------------------------------------------------- in a run

TINY = dict(rounds=2, clients=4, epochs=1, batch_size=50, engine="sequential")


@pytest.mark.parametrize(("when", "rounds"), [("last", {2}), ("every", {1, 2}), ("none", set())])
def test_when_a_run_makes_them(tmp_path, when, rounds):
    run = perfed.run("fedavg", "ditto", out=tmp_path / "run", baseline=False, scores=when, **TINY)
    for method in run.entries:
        lines = [json.loads(line) for line in (run.path / method / "metrics.jsonl").read_text().splitlines()]
        assert {line["round"] for line in lines if "auc" in line["personal"]["test"]} == rounds
        assert ("macro_f1" in run.result(method)["clients"][0]["personal"]["val"]) == bool(rounds)
        found = measures.summary(run, method)
        assert ("macro_f1" in found) == ("auc" in found) == bool(rounds)
        if rounds:
            assert found["auc"] == pytest.approx(np.mean(run.scores(method, "auc")))
            client = run.clients(method)[0]
            assert 0 <= client.scores["personal"]["test"]["macro_f1"] <= 1


def test_a_run_that_stops_by_itself_has_them(tmp_path):
    """Which evaluation is the last is known only after it."""
    settings = TINY | dict(rounds=50, patience=1, lr=1e-9, baseline=False, engine="sequential")
    run = perfed.run("fedavg", "ditto", out=tmp_path / "run", **settings)
    for method in run.entries:
        assert run.result(method)["rounds"] == 2
        assert 0 < run.scores(method, "auc").mean() < 1
        last = json.loads((run.path / method / "metrics.jsonl").read_text().splitlines()[-1])
        assert last["personal"] == run.result(method)["clients"][-1]["personal"]
