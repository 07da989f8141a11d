"""Paired step times of the engine: ours beside the library's own checkpointing, in one process, one thread.

    MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=268435456 \\
        python scripts/bench_engine.py [--repeats 9] [--case selective|full|keep_all|all]

Times are CPU seconds of the one thread, which other work on the machine disturbs least. Each round times every variant
once, in an order that rotates; a ratio is taken within a round, and the median and the interquartile range of the
ratios are printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
}
if any(os.environ.get(key) != value for key, value in _MALLOC.items()):  # glibc reads them at start only
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **_MALLOC, "OMP_NUM_THREADS": "1"})

import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

import ckpt  # noqa: E402

CASES = {
    # name: (tokens, variants, baseline of each ratio)
    "full": (4096, ["library", "full"], "library"),
    "selective": (4096, ["none", "full", "selective"], "none"),
    "keep_all": (1024, ["none", "keep_all"], "none"),
    "keep_all_64": (64, ["none", "keep_all"], "none"),
}
STRATEGIES = {
    "full": ckpt.Full(),
    "selective": ckpt.Selective("attention"),
    "keep_all": ckpt.Selective("*"),
}


def small_llama(num_tokens: int) -> LlamaForCausalLM:
    """4 layers, hidden 256, 4 heads, vocab 512, fp32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=896,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        vocab_size=512,
        max_position_embeddings=num_tokens,
    )
    return LlamaForCausalLM(config).train()


def seconds(model, batch, variant: str) -> float:
    """One step (forward, backward) under a variant, its set-up and first, recorded step left out."""
    handle = None
    if variant == "library":
        model.activation_checkpointing_enable()
    elif variant != "none":
        handle = ckpt.apply(model, STRATEGIES[variant])
    for _ in range(2):
        model.zero_grad()
        start = time.process_time()
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        elapsed = time.process_time() - start
    if variant == "library":
        model.activation_checkpointing_disable()
    elif handle is not None:
        handle.undo()
    return elapsed


def main() -> None:
    """Print one line a variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--case", default="all", choices=["all", *CASES])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in CASES if arguments.case == "all" else [arguments.case]:
        num_tokens, variants, baseline = CASES[name]
        model = small_llama(num_tokens)
        batch = torch.randint(0, 512, (1, num_tokens))
        times: dict[str, list[float]] = {v: [] for v in variants}
        for round_ in range(arguments.repeats):
            for k in range(len(variants)):
                variant = variants[(k + round_) % len(variants)]
                times[variant].append(seconds(model, batch, variant))
        for variant in variants:
            ratios = [a / b for a, b in zip(times[variant], times[baseline], strict=True)]
            low, _, high = statistics.quantiles(ratios, n=4)
            print(
                f"{name:>12} T={num_tokens:<5} {variant:>10}: best {min(times[variant]):7.3f} s, over {baseline}: "
                f"median {statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}], best/best "
                f"{min(times[variant]) / min(times[baseline]):.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
