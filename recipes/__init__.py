"""Training recipes: readable programs on top of `ckpt`."""
