"""Rotation: two groups of clients, one of which sees its images turned by 180 degrees.

A single model can learn both, though two models learn more. For images.
"""

SETTINGS = {
    "partition": "iid",
    "clients": 20,
    "test": 0.5,
    "val": 0.0,
    "stratify": False,
    "rotate": "0,180",
}
