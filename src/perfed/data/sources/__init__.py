"""Data sets, one file each.

A data set is added by writing its file. The docstring begins `Title: what there is.`, and the file defines
`load(config, seed) -> Pool`: a `perfed.data.pool.Pool(x, y, classes)` with x float32, or uint8 for images, and y int64
from 0 (the rest of it is optional); `config` is a `perfed.data.config.DataConfig`. `USUAL_PARTITION` names the scheme
that is used where none is asked for (otherwise 'dirichlet'), `ONLY_PARTITION` the only one that makes sense.
"""
