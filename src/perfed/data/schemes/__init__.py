"""Partition schemes, one file each: how one data set becomes clients.

A scheme is added by writing its file. The docstring begins `Title: what the clients get.`, `READS` names the settings
that it reads beside data.clients, and it defines one of two functions:

- `share(sizes, config, rng) -> Shares`: how many samples of every class each client gets; the samples are drawn from it
- `rows(pool, config, rng) -> list of arrays`: the rows of each client

A scheme with `share` may define `strata(pool, config)` where samples are counted by something other than their class.
"""
