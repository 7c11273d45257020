"""An agent for FAVOR: trains one in the default federation, and puts it where the method finds it.

    python bench/favor_agent.py                                    # minutes, on one core
    python bench/favor_agent.py --episodes 5 --steps 3 --out agent.safetensors

The file holds the weights of the agent's network in 16 bits, and what the clients' models are like after the first
round, by which the method recognises the federation. Any other seed, split or setting of local training is another one.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

import perfed
from perfed.methods.shared.agents import FOLDER
from perfed.training.provenance import commit

HOW = {"participation": 0.2, "engine": "sequential", "device": "cpu", "baseline": False}
QUIET = {"save_models": "none", "scores": "none", "eval_every": 10**9, "checkpoint_every": 10**9}


def main() -> None:
    """Train an agent and write it."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--episodes", type=int, default=300)
    options.add_argument("--steps", type=int, default=20, help="rounds of one client in an episode, at most")
    options.add_argument("--target", type=float, default=0.85, help="accuracy that ends an episode")
    options.add_argument("--out", type=Path, default=FOLDER / "digits.safetensors")
    given = options.parse_args()
    torch.set_num_threads(1)
    settings = {"episodes": given.episodes, "steps": given.steps, "target": given.target}
    with tempfile.TemporaryDirectory(prefix="perfed-favor-") as folder:
        rounds = 1 + given.episodes * (1 + given.steps)
        run = perfed.run("favor", out=f"{folder}/run", rounds=rounds, **settings, **HOW, **QUIET)
        agent = run.folder.method("favor").server()["agent"]
    about = {name: str(value) for name, value in (settings | HOW).items()}
    about |= {"commit": commit(), "command": "python bench/favor_agent.py"}
    given.out.parent.mkdir(exist_ok=True)
    save_file({"q": agent["q"].half(), "fingerprint": agent["first"]}, given.out, about)


if __name__ == "__main__":
    main()
