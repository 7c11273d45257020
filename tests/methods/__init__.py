"""Tests of methods; a package, because files of `beat` have the same names."""
