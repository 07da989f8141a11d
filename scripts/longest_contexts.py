"""The longest context of Llama-shaped models by device: predictions, beside Hugging Face's own checkpointing and ALST.

    OMP_NUM_THREADS=1 python scripts/longest_contexts.py [--models 8B,32B,70B] [--settings lora,sharded,alst]

Nothing here was measured on a device: each figure is a step on fake tensors that fits the device's memory (batch 1,
bf16), in multiples of 8K tokens. What only CUDA's kernels and allocator take is an H100's everywhere. Settings:

- lora: one device, adapters of rank 16 on all linear layers, AdamW.
- sharded: full fine-tuning, one sequence a device, states sharded over 8 devices (FSDP). Of fp32 masters, two AdamW
  moments and fp32 gradients each holds an eighth, 2 bytes a parameter; gathered stand two layers, one layer's
  gradients, and the embedding or the head. Activations and workspace are those of the step on one device.
- alst: full fine-tuning, one device, the optimizer on the host: bf16 parameters and gradients. ALST (arXiv:2506.13996,
  table of its README) published 65K for stock Hugging Face and 1.2M with everything, Llama-3.1-8B on one H200.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from transformers import LlamaConfig

import ckpt
from ckpt.fake import on_meta
from ckpt.hardware import find
from ckpt.longest import longest
from ckpt.predict import Prediction, read
from ckpt.simulate import Simulator
from ckpt.timeline import ACTIVATIONS, WORKSPACE

DEVICES = {"24 GiB": "rtx4090", "48 GiB": "l40s", "80 GiB": "h100", "141 GiB": "h200"}
SHAPES = {  # hidden, MLP, layers, heads, key-value heads, vocabulary
    "8B": (4096, 14336, 32, 32, 8, 128256),
    "32B": (5120, 25600, 64, 64, 8, 151936),
    "70B": (8192, 28672, 80, 64, 8, 128256),
}
TILES = 64
WAYS = {
    "Hugging Face": None,
    "`full`, tiles": ckpt.Full(),
    "`offload` (host), tiles": ckpt.Offload(),
}
STEP = 8192
SEEDS = (131072, 1048576)


@dataclass(frozen=True)
class Case:
    """A model's shape, how it is trained, and what is done with its activations."""

    shape: str
    setting: str
    way: str

    def peaks(self, tokens: int) -> tuple[int, int]:
        """Predict one step; return the bytes on the device and on the host."""
        model = meta_model(self.shape)
        strategy = WAYS[self.way]
        if self.setting == "lora":
            model = with_adapters(model)
        if strategy is None:
            model.activation_checkpointing_enable()
        work = ckpt.Workload(
            seq_len=tokens, dtype="bf16_pure", optimizer="adamw" if self.setting == "lora" else None,
            loss="chunked", tile_mlp=TILES,
        )  # fmt: skip
        prediction = read(Simulator(model, work).run(strategy), work, find("h100"))
        peak = prediction.peak_bytes
        if self.setting == "sharded":
            peak = sharded_peak(prediction, model)
        return peak, prediction.host_bytes


def meta_model(shape: str) -> torch.nn.Module:
    """Make a model without weights."""
    hidden, mlp, layers, heads, kv_heads, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads, head_dim=128,
        num_key_value_heads=kv_heads, vocab_size=vocabulary, tie_word_embeddings=False, attn_implementation="sdpa",
        max_position_embeddings=2**24,
    )  # fmt: skip
    return on_meta(config)


def with_adapters(model: torch.nn.Module) -> torch.nn.Module:
    """Add LoRA of rank 16 to all linear layers."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))


def sharded_peak(prediction: Prediction, model: torch.nn.Module, ranks: int = 8) -> int:
    """Return the peak of one rank of `ranks`, from a step on one device without optimizer."""
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    head = model.lm_head.weight.numel()
    states = 16 * sum(p.numel() for p in model.parameters()) // ranks
    gathered = 2 * (2 * layer + layer + head)
    columns = prediction.timeline.bytes[:, [ACTIVATIONS, WORKSPACE]].sum(axis=1)
    return states + gathered + int(columns.max()) + prediction.device_only_bytes


def row(case: Case, say) -> list[str]:
    """Search for each device, from small to large; what one search tried, the next one knows."""
    host: dict[int, int] = {}
    cells = []

    def peak(tokens: int) -> int:
        found, host[tokens] = case.peaks(tokens)
        say(f"{case} {tokens:,} tokens: {found / 2**30:.1f} GiB, host {host[tokens] / 2**30:.0f}")
        return found

    known = {tokens: peak(tokens) for tokens in (STEP, *SEEDS)}
    for device in DEVICES.values():
        found = longest(peak, find(device).usable_bytes, step=STEP, known=known, check_next=False)
        known = dict(found.peaks)
        if not found.seq_len:
            cells.append("-")
            continue
        away = host.get(found.seq_len, 0)
        cells.append(f"{found.seq_len // 1024:,}K" + (f" ({away / 2**30:,.0f})" if away else ""))
    return cells


def main() -> None:
    """Print one table a setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--settings", default="lora,sharded,alst")
    parser.add_argument("--quiet", action="store_true", help="say nothing of each prediction")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    say = (lambda text: None) if arguments.quiet else (lambda text: print(text, flush=True))
    for setting in arguments.settings.split(","):
        lines = []
        for shape in arguments.models.split(","):
            if setting == "alst" and shape != "8B":
                continue
            lines += [f"| {shape} | {way} | " + " | ".join(row(Case(shape, setting, way), say)) + " |" for way in WAYS]
        print(f"\n{setting}: predicted, K = 1,024 tokens, in brackets GiB on the host\n")
        print("| model | | " + " | ".join(DEVICES) + " |\n" + "|---" * (2 + len(DEVICES)) + "|")
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
