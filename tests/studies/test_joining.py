"""Clients that join after training, as the study of PGFed's Figure 4 scores them."""

import json
from types import SimpleNamespace

from perfed.studies.papers.joining import score_newcomers
from perfed.training.config import from_dict
from perfed.training.files import Folder
from perfed.training.prepare import prepare

DATA = {"clients": 4, "partition_seed": 0}


def test_newcomers_batches_follow_the_seed_of_the_run(tmp_path):
    """The same clients and the same start: what differs is the order of their samples."""
    scores = []
    for seed in (3, 3, 4):
        experiment = prepare(
            from_dict({"methods": ["local"], "data": DATA, "run": {"engine": "sequential", "seed": seed}})
        )
        (entry,) = experiment.config.entries()
        start = experiment.method(entry).model.init(0)
        file = tmp_path / "newcomers.json"
        training = SimpleNamespace(server=lambda start=start: start)
        run = SimpleNamespace(files=Folder(tmp_path))
        cell = SimpleNamespace(first=0.5, run=run, training=training, tuned=1, newcomers_file=file)
        score_newcomers(experiment, cell)
        scores.append(json.loads(file.read_text()))
    assert scores[0] == scores[1] != scores[2]
