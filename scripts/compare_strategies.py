"""One table of strategies on one small model: measured peak, FLOPs over `none`, CPU time over `none`.

    OMP_NUM_THREADS=1 python scripts/compare_strategies.py [--tokens 4096] [--rounds 3] [--loss chunked]

Bytes and FLOPs are exact and repeat; times are CPU seconds of one thread, medians of ratios taken within a round, and
every strategy's first, recorded step is left out. The README's table comes from here.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from bench_engine import small_llama

import ckpt
from ckpt.flops import FlopCounter
from ckpt.ledger import measure
from recipes.allocator import keep_freed_memory

ROWS = {
    "`none`": ("none", 1),
    "library: `activation_checkpointing_enable()`": (None, 1),
    "`full`": (ckpt.Full(), 1),
    "`full`, `tile_mlp=8`": (ckpt.Full(), 8),
    "`every_n` (2)": (ckpt.EveryN(2), 1),
    "`segments` (2, keep)": (ckpt.Segments(2, "keep"), 1),
    "`segments` (2, replay)": (ckpt.Segments(2, "replay"), 1),
    "`selective` (attention)": (ckpt.Selective("attention"), 1),
    "`selective` (attention+matmul)": (ckpt.Selective("attention+matmul"), 1),
    "`offload` (disk), `tile_mlp=8`": (ckpt.Offload(target="disk"), 8),
}


def prepare(model, strategy, tiles: int, loss: str):
    """Put a strategy in force; return what takes it back."""
    if strategy is None:
        handle = ckpt.apply(model, "none", loss=loss)
        model.activation_checkpointing_enable()
        return lambda: (model.activation_checkpointing_disable(), handle.undo())
    return ckpt.apply(model, strategy, loss=loss, tile_mlp=tiles).undo


def step(model, ids) -> None:
    """Forward and backward."""
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3, help="0: bytes and FLOPs alone")
    parser.add_argument("--loss", default="chunked", choices=["chunked", "full"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    model = small_llama(arguments.tokens)
    ids = torch.randint(0, 512, (1, arguments.tokens))
    peaks, flops, times = {}, {}, {name: [] for name in ROWS}
    for round_ in range(arguments.rounds + 1):
        for name, (strategy, tiles) in ROWS.items():
            undo = prepare(model, strategy, tiles, arguments.loss)
            step(model, ids)
            if round_ == 0:
                with measure(model, inputs=(ids,)) as ledger, FlopCounter() as counter:
                    step(model, ids)
                peaks[name], flops[name] = ledger.peak_bytes, counter.total
            else:
                start = time.process_time()
                step(model, ids)
                times[name].append(time.process_time() - start)
            undo()
        print(f"round {round_} of {arguments.rounds}", flush=True)
    print(f"\n4 layers, hidden 256, {arguments.tokens} tokens, fp32, loss={arguments.loss}, one thread\n")
    print("| strategy | peak MiB | FLOPs / none | CPU time / none |\n|---|---|---|---|")
    for name in ROWS:
        ratios = [a / b for a, b in zip(times[name], times["`none`"], strict=True)]
        spent = f"{statistics.median(ratios):.2f}" if ratios else "-"
        print(f"| {name} | {peaks[name] / 2**20:.1f} | {flops[name] / flops['`none`']:.3f} | {spent} |")


if __name__ == "__main__":
    main()
