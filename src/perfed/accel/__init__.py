"""The machine: kernels, recorded steps and hand-written gradients. Engines plug it in; nothing else knows of it."""
