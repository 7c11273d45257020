"""Learning rates from round to round: those of PyTorch's schedulers."""

import pytest
import torch
from torch.optim import SGD, lr_scheduler

from perfed.core.errors import Problem
from perfed.core.rates import Rates
from perfed.training.config import from_dict
from perfed.training.prepare import rates_of

ROUNDS = 7
PYTORCH = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.4),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=ROUNDS, eta_min=0.2 * 0.05),
    "linear": lambda optimizer: lr_scheduler.LinearLR(optimizer, start_factor=1, end_factor=0.2, total_iters=ROUNDS),
}


@pytest.mark.parametrize("schedule", PYTORCH)
def test_a_round_is_a_step_of_pytorchs_scheduler(schedule):
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=0.05)
    theirs, rates = PYTORCH[schedule](optimizer), Rates(schedule, ROUNDS, every=3, decay=0.4, end=0.2)
    for round in range(1, ROUNDS + 1):
        assert 0.05 * rates.factor(round) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("schedule", ["constant", *PYTORCH])
def test_before_the_first_and_after_the_last_round(schedule):
    """An evaluation before round 1 has its rate; newcomers, who train after the last round, the last rate or less."""
    rates = Rates(schedule, ROUNDS)
    assert rates.factor(0) == rates.factor(1) == 1
    assert 0 < rates.factor(ROUNDS + 9) <= rates.factor(ROUNDS)


def test_settings_of_another_schedule_are_refused():
    run = lambda **settings: rates_of(from_dict({"run": settings}).run)
    assert run() == Rates(rounds=25)
    assert run(lr_schedule="step", lr_step=4, lr_decay=0.9, rounds=9) == Rates("step", 9, 4, 0.9)
    with pytest.raises(Problem, match=r"^run.lr_step belongs to run.lr_schedule = step, not constant$"):
        run(lr_step=4)
    with pytest.raises(Problem, match=r"^run.lr_end belongs to run.lr_schedule = cosine or linear, not step$"):
        run(lr_schedule="step", lr_end=0.1)
    with pytest.raises(Problem, match=r"run.lr_schedule must be one of constant, step, cosine, linear, not 'cos'"):
        run(lr_schedule="cos")
