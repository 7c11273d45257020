"""Label groups: two groups of clients, of which one calls class y what the other calls y + 3.

No single model fits both groups, and a client alone has too few samples: clustering finds what an oracle knows.
"""

SETTINGS = {
    "partition": "iid",
    "clients": 20,
    "test": 0.5,
    "val": 0.0,
    "stratify": False,
    "relabel": 1.0,
    "relabel_by": "shift",
    "relabel_shift": 3,
    "relabel_groups": 2,
}
