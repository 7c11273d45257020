"""Label swaps: each of 20 clients swaps two labels of its own, and has 30 training samples.

Most of what the others know is right for a client: neither a model for all nor one for each is best.
"""

SETTINGS = {
    "samples": 1200,
    "partition": "iid",
    "clients": 20,
    "test": 0.5,
    "val": 0.0,
    "stratify": False,
    "relabel": 1.0,
    "relabel_by": "swap",
    "relabel_groups": 0,
}
