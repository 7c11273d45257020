"""Dirichlet: each client has some classes more than others, and they agree on what is what.

A model for all is good here, and a personal one has to be better than it.
"""

SETTINGS = {
    "partition": "dirichlet",
    "alpha": 0.3,
    "clients": 20,
    "cap": False,
    "min_samples": 28,
    "test": 0.5,
    "val": 0.0,
    "stratify": False,
}
