"""Tiny random models of every causal-LM architecture of the installed transformers.

    model = zoo.build("gemma2", dropout=0.1)     # fp32, CPU, training mode, about 0.2 M parameters
    loss = model(**zoo.batch(model, seq_len=16)).loss

`zoo.names()` lists them all, `zoo.KNOWN_UNBUILDABLE` says which cannot be built and why, `zoo.REPRESENTATIVE` holds the
families that differ in kind, for tests that cannot afford all.
"""

from .families import REPRESENTATIVE
from .models import KNOWN_UNBUILDABLE, batch, build, config, names, tensors_of, vary_weights

__all__ = ["KNOWN_UNBUILDABLE", "REPRESENTATIVE", "batch", "build", "config", "names", "tensors_of", "vary_weights"]
