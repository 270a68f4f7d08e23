"""Device functions: each a plain PyTorch reference and, where it pays, a Triton twin of the same signature."""
