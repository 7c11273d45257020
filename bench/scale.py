"""What many clients cost: memory, start, rounds, a whole run of 100,000. Every number comes from a fresh process.

    python bench/scale.py                  # prints JSON; writes bench/results/scale.json and curves.csv, curves.png
    python bench/scale.py memory start     # some of them, printed only

Of several starts the shortest counts. CPU seconds are what other programs on the machine disturb least; peak memory is
the process's largest resident set.
"""

import contextlib
import csv
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve()
RESULTS = HERE.parent / "results"
SAMPLES = 25_000  # images in all, whatever the number of clients
BUDGET = 64  # MB of states kept in memory
COMMAND = (
    "run {method} --data synthetic --clients {clients} --synthetic-samples 20 --model mlr --epochs 1 --lr 0.02 "
    "--participation {share} --rounds {rounds} --eval-every {rounds} --no-baseline"
)


def peak() -> float:
    """Return the largest resident set so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e3 if sys.platform == "linux" else 1e6)


def table(clients: int, each: int, shape: tuple[int, ...], image: bool):
    """Make random samples, `each` for every client: 4 of 5 to train, 1 of 5 to test."""
    import torch

    from perfed.core.clients import Clients, Split

    draw = torch.Generator().manual_seed(0)

    def split(count: int) -> Split:
        size = (clients * count, *shape)
        x = (
            torch.randint(0, 256, size, generator=draw, dtype=torch.uint8)
            if image
            else torch.randn(size, generator=draw)
        )
        return Split(x, torch.randint(0, 10, (len(x),), generator=draw), (count,) * clients)

    train, test = split(each * 4 // 5), split(each // 5)
    return Clients(tuple(map(str, range(clients))), train, Split(test.x[:0], test.y[:0], (0,) * clients), test, 10)


def federation(clients, network, cohort: int, kind: str = "ditto", budget=(None,), **settings):
    """Make a federation on the sequential engine: one thread, one process."""
    import torch

    from perfed.core.model import Model
    from perfed.engines.base import Job
    from perfed.engines.local import Sequential
    from perfed.federation.federation import Federation
    from perfed.training.catalog import methods

    torch.set_num_threads(1)
    method = methods()[kind].load()(Model(network), lr=0.01, epochs=1, **settings)
    engine = Sequential(Job(method, clients, cohort=cohort), memory=budget)
    return Federation(engine)


# ---------------------------------------------------------------------- each of these runs in a process of its own


def memory(clients: int, megabytes: int) -> dict:
    """Run Ditto on LeNet, ten clients a round until each has a state, then a checkpoint and an evaluation."""
    from perfed.models.lenet import LeNet
    from perfed.training.folder import MethodFolder
    from perfed.training.observers.checkpoint import Checkpoints
    from perfed.training.observers.log import MetricsLog

    data = table(clients, SAMPLES // clients, (3, 32, 32), image=True)
    fed = federation(data, lambda: LeNet(3, 32, 32, 10), 10, budget=(megabytes * 10**6 or None,))
    began = time.process_time()
    for first in range(0, clients, 10):
        fed.step(range(first, first + 10))
    trained = time.process_time() - began
    with tempfile.TemporaryDirectory(dir=RESULTS) as folder:
        method = MethodFolder(Path(folder))
        Checkpoints(method, 1, MetricsLog(method)).write(fed)
        written = sum(path.stat().st_size for path in Path(folder).rglob("*.rows"))
    fed.evaluate()
    return {
        "registered": clients,
        "states": len(fed.engine.states[0]),
        "state_memory_mb": megabytes,
        "states_mb": round(len(fed.engine.states[0]) * fed.engine.states[0].width / 1e6, 1),
        "checkpoint_mb": round(written / 1e6, 1),
        "data_mb": round(SAMPLES * 3072 / 1e6, 1),
        "cpu_seconds_per_round": round(trained / (clients / 10), 4),
        "peak_rss_mb": round(peak(), 1),
    }


def start(clients: int) -> dict:
    """Measure from the start of the process, imports and data included, until the first round begins."""
    command = COMMAND.format(method="fedavg", clients=clients, share=10 / clients, rounds=1)
    began = float(os.environ["BEGAN"])
    from perfed.cli import app
    from perfed.federation.federation import Federation

    class Begun(BaseException):
        pass

    def begin(*_):
        raise Begun

    Federation.begin = begin
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["perfed", *command.split(), "--quiet", "--out", f"{folder}/run"]
        with contextlib.suppress(Begun):
            app.main()
    return {
        "registered": clients,
        "command": f"perfed {command}",
        "wall_seconds": round(time.time() - began, 2),
        "cpu_seconds": round(time.process_time(), 2),
    }


def rounds(few: int, many: int) -> dict:
    """Measure a round of ten clients among few and among many, in turns: Ditto, multinomial logistic regression."""
    from torch import nn

    network = lambda: nn.Sequential(nn.Flatten(), nn.Linear(60, 10))
    feds = {n: federation(table(n, 25, (60,), image=False), network, 10) for n in (few, many)}
    spent = {n: [] for n in feds}
    for _ in range(100):
        for n, fed in feds.items():
            began = time.process_time()
            fed.step()
            spent[n].append(time.process_time() - began)
    median = {n: statistics.median(times) for n, times in spent.items()}
    each = {str(n): round(1e3 * m, 3) for n, m in median.items()}
    return {"cohort": 10, "cpu_ms_per_round": each, "ratio": round(median[many] / median[few], 3)}


def whole(clients: int, method: str = "fedavg") -> dict:
    """Run the command itself, with 100 clients a round for 20 rounds, an evaluation of all and the report."""
    from perfed.training.folder import RunFolder

    command = COMMAND.format(method=method, clients=clients, share=100 / clients, rounds=20)
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        words = [Path(sys.executable).parent / "perfed", *command.split(), "--quiet", "--out", f"{folder}/run"]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        wall, used = time.time() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        times = RunFolder(Path(folder) / "run").method(method).seconds()
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    return {
        "registered": clients,
        "command": f"perfed {command}",
        "wall_seconds": round(wall, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "median_wall_seconds_per_round": round(statistics.median(times[:-1]), 3),
        "last_round_with_evaluation_wall_seconds": round(times[-1], 2),
        "peak_rss_mb": round(used.ru_maxrss / 1e3, 1),
        "run_folder_mb": round(size / 1e6, 1),
    }


def curve(kind: str) -> list[dict]:
    """Measure a round of FedAvg against the clients in it, or against the width of an MLP (10 clients)."""
    from torch import nn

    data, points = table(200, 125, (60,), image=False), []
    sizes = [(c, 64) for c in (1, 2, 5, 10, 20, 50, 100, 200)]
    if kind == "width":
        sizes = [(10, h) for h in (16, 64, 256, 1024, 4096, 16384)]
    for cohort, hidden in sizes:
        network = lambda h=hidden: nn.Sequential(nn.Flatten(), nn.Linear(60, h), nn.ReLU(), nn.Linear(h, 10))
        fed, spent = federation(data, network, cohort, "fedavg", batch_size=10), []
        for _ in range(6):
            began = time.process_time()
            fed.step()
            spent.append(time.process_time() - began)
        seconds = round(statistics.median(spent[1:]), 5)
        points.append({"curve": kind, "cohort": cohort, "parameters": fed.method.model.P, "cpu_seconds": seconds})
    return points


# ---------------------------------------------------------------------- all together


PARTS = {
    "memory": [("memory", 100, BUDGET), ("memory", 5000, BUDGET), ("memory", 5000, 0)],
    "start": [("start", 10_000)] * 3,
    "rounds": [("rounds", 100, 10_000)],
    "whole": [("whole", 100_000)],
    "pgfed": [("whole", 100_000, "pgfed")],
    "curves": [("curve", "cohort"), ("curve", "width")],
}


def fresh(call: tuple) -> object:
    """Call one of the functions above in a new process."""
    words = [sys.executable, str(HERE), "--in-process", json.dumps(call)]
    done = subprocess.run(
        words, check=True, capture_output=True, text=True, env=os.environ | {"BEGAN": str(time.time())}
    )
    return json.loads(done.stdout.splitlines()[-1])


def machine() -> dict:
    """Say what the numbers depend on."""
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE.parent, capture_output=True, text=True)
    return {
        "command": "python bench/scale.py",
        "commit": commit.stdout.strip(),
        "seed": 0,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "load_average_at_start": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
    }


def draw(curves: list[dict], path: Path) -> None:
    """Draw two panels, both axes logarithmic, with a line of slope one to compare with."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = (
        ("cohort", "cohort", "clients in the round", "MLP of 4,554 parameters"),
        ("width", "parameters", "parameters of the model", "10 clients in the round"),
    )
    for axes, (kind, column, label, title) in zip(figure.subplots(1, 2), panels, strict=True):
        x, y = zip(*[(point[column], point["cpu_seconds"]) for point in curves if point["curve"] == kind], strict=True)
        axes.loglog(x, y, marker="o", color="#1f77b4", label="a round of FedAvg")
        axes.loglog(x, [y[-1] * v / x[-1] for v in x], linestyle=":", color="#7f7f7f", label="in proportion")
        axes.set(xlabel=label, ylabel="CPU seconds per round", title=title)
        axes.grid(alpha=0.3)
        if kind == "cohort":
            axes.set_xticks(x, [str(v) for v in x])
            axes.minorticks_off()
        axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Measure what was asked for, print it, and keep it where that was everything."""
    wanted = sys.argv[1:] or list(PARTS)
    measured: dict = machine()
    for part in wanted:
        results = [fresh(call) for call in PARTS[part]]
        measured[part] = results if len(results) > 1 else results[0]
    if "memory" in measured:
        few, many, _ = (part["peak_rss_mb"] for part in measured["memory"])
        measured["memory_above_100_clients_mb"] = round(many - few, 1)
    if "start" in measured:
        fastest = lambda attempt: attempt["wall_seconds"]  # other programs only ever add
        measured["start"] = min(measured["start"], key=fastest)
    curves = [point for points in measured.pop("curves", []) for point in points]
    if not sys.argv[1:]:
        (RESULTS / "scale.json").write_text(json.dumps(measured, indent=1) + "\n")
        with (RESULTS / "curves.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(curves[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(curves)
        draw(curves, RESULTS / "curves.png")
    sys.stdout.write(json.dumps(measured | ({"curves": curves} if curves else {}), indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--in-process"]:
        name, *arguments = json.loads(sys.argv[2])
        sys.stdout.write(json.dumps(globals()[name](*arguments)) + "\n")
    else:
        main()
