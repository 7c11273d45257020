"""The machine: fused layers, kernels and recorded steps. Engines plug it in, through `fast_model` and `loops`."""
