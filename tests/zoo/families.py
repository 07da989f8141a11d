"""The families that differ in kind, for tests that cannot afford all architectures."""

from __future__ import annotations

REPRESENTATIVE: dict[str, str] = {
    # dense
    "llama": "the plain decoder: rotary positions, grouped queries, tied to nothing",
    "qwen3": "norms on queries and keys",
    "phi3": "fused query-key-value and gate-up projections",
    "opt": "learned positions, biases, dropout everywhere, layer dropping",
    "gpt2": "the cache is a positional argument of the layer; Conv1D weights",
    "falcon": "attention and MLP side by side, one key/value head",
    "cohere2": "parallel block, logit scale, windows on three layers of four",
    "olmo2": "norms after the block only",
    "gemma2": "norms before and after, soft caps on scores and logits, sliding windows, eager attention",
    "bloom": "ALiBi biases built outside the layers; dropout and residual fused in one function",
    "bert": "encoder layers used as a decoder, norms after the residual",
    # attention of another kind
    "gemma3n_text": "keys and values of earlier layers reused; in-place writes into matmul outputs; per-layer inputs",
    "gemma4_text": "shared keys and values passed in a container that layers write into",
    "deepseek_v32": "latent attention: query-key and value widths differ; an indexer without gradients; shared experts",
    "diffllama": "differential attention: two softmaxes a layer",
    "doge": "dynamic masks made of values, inside the layer",
    # mixtures of experts
    "mixtral": "routed experts by grouped matmul; router noise",
    "gpt_oss": "attention sinks, biases added in place to expert outputs",
    "dbrx": "experts kept in one matrix, clipped queries and keys",
    # recurrent and hybrid
    "qwen3_next": "gated delta rule beside attention, hundreds of small ops a layer",
    "mamba2": "state space layers, no attention at all",
    "rwkv": "time mixing: no attention, a loop over tokens",
    "jamba": "Mamba, attention, dense MLP and experts take turns",
    "zamba2": "one attention block shared by several layers",
    "recurrent_gemma": "recurrent states kept as module attributes; the cache is a positional argument",
    "lfm2": "short convolutions beside attention",
    # other shapes of model
    "bart": "decoder with cross-attention, encoder states that need a gradient",
    "gemma3": "a vision tower that text never calls",
    "dory": "layers called several times in a forward",
    "hrm_text": "two stacks called in nested loops",
    "blt": "three stacks: local encoder, patches, local decoder",
    "xlnet": "layers of a plain class; two streams",
    "ctrl": "layers of a plain class; the mask is a positional argument",
}
"""Architecture -> why it is here."""
