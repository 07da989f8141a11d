"""Activation checkpointing for Hugging Face causal LMs: keep, recompute or offload, tensor by tensor, exactly."""
