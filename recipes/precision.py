"""The number formats of training: they live in `ckpt.precision`, because a prediction casts and copies just as a run does."""

from ckpt.precision import DTYPES, Precision, prepare

__all__ = ["DTYPES", "Precision", "prepare"]
