"""Every experiment in which one method is to beat another: runs their tests and keeps the scores that these look at.

    python bench/experiments.py                # writes bench/results/experiments.jsonl
    python bench/experiments.py --workers 14 --only test_zhao.py test_fedcl.py --out notes.jsonl

Of what lies in the folder of results docs/comparison.md is made, when `PERFED_WRITE_DOCS=1 pytest tests/docs` runs
next. A test that fails is named on the way, and its scores are kept like the others. Real data sets are looked for as
the tests do it (PERFED_DATA names their folder).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from perfed.training.provenance import commit, hardware

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Run the tests, then write how, and each score once, in an order that does not depend on who was first."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--workers", type=int, default=2, help="processes, each on one core")
    options.add_argument("--only", nargs="*", default=[""], help="files of tests/methods/beat; default: all")
    options.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "experiments.jsonl")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="perfed-experiments-") as folder:
        notes = Path(folder) / "notes.jsonl"
        tests = [str(Path("tests", "methods", "beat", name)) for name in given.only]
        words = ["-m", "slow", "-q", "-n", str(given.workers), "--dist", "worksteal", "--timeout", "3000", *tests]
        one_core = os.environ | {"PERFED_NOTES": str(notes), "OMP_NUM_THREADS": "1"}
        ended = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, env=one_core, check=False).returncode
        lines = sorted(set(notes.read_text(encoding="utf-8").splitlines())) if notes.is_file() else []
    command = "python " + " ".join(["bench/experiments.py", *(["--only", *given.only] if given.only != [""] else [])])
    how = {"command": command, "commit": commit(), "machine": hardware("cpu"), "torch": torch.__version__}
    given.out.write_text("\n".join([json.dumps(how), *lines]) + "\n", encoding="utf-8")
    return ended


if __name__ == "__main__":
    sys.exit(main())
