"""Partition schemes, one file each: how one data set becomes clients.

A scheme is added by writing its file. The docstring begins `Title: what the clients get.`, `READS` names the settings
that it reads beside data.clients, which a run's record then shows, `BY_LABEL = True` that it needs samples of different
labels, and it defines one of two functions:

- `share(sizes, config, rng) -> Shares`: how many samples of every class each client gets, of `sizes` [classes] that
  there are; the samples are drawn from it (`perfed.data.allocation` has `Shares` and what helps to make one)
- `rows(pool, config, rng) -> list of arrays`: the rows of each client, ascending, no row twice, `config.clients` arrays

For other tasks than classification the strata of `perfed.data.strata` stand for classes: bins of numbers, the rarest
label of a sample.

`config` is a `perfed.data.config.DataConfig` (`clients`, `classes_per_client`, ...; a new setting is a new field
there), `pool` a `perfed.data.pool.Pool`, `rng` a numpy Generator; what cannot be done is a `Problem` with one sentence
(`perfed.core.errors`). A scheme with `share` may define `strata(pool, config)` where samples are counted by something
other than their class; it keeps the promise of `--split official`, that all parts are dealt alike. One with `rows` has
to keep it itself.
"""
