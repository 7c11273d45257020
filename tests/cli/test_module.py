"""`python -m perfed` is `perfed`."""

import subprocess
import sys

import perfed


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "perfed", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"perfed {perfed.__version__}\n"
    done = subprocess.run([sys.executable, "-m", "perfed", "nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("perfed: there is no command 'nonsense'")
