"""Many runs: comparisons, searches, the papers' tables, benchmarks."""
