"""The number formats of training, from `ckpt.precision`: a prediction casts and copies just as a run does."""

from ckpt.precision import DTYPES, Precision, prepare

__all__ = ["DTYPES", "Precision", "prepare"]
