"""Experiments in which one method is to beat another, all of them slow: see tests/beat.py."""
