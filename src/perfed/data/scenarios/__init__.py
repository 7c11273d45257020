"""Scenarios, one file each: named problems of personalised learning, as settings of the section `data`.

A scenario is added by writing its file. The docstring begins `Title: what the clients are like.`, and `SETTINGS` is a
dict of plain values, named as in `perfed.data.config.DataConfig`. Whatever a user sets goes before it, so a scenario
sets what makes the problem and nothing else: neither a data set nor how methods train.
"""
