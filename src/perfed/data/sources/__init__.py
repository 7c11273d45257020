"""Data sets, one file each.

A data set is added by writing its file. The docstring begins `Title: what there is.`, and the file defines
`load(config, seed) -> Pool`. `USUAL_PARTITION` names the scheme that is used where none is asked for (otherwise
'dirichlet'), `ONLY_PARTITION` the only one that makes sense.
"""
