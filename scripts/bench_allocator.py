"""What `recipes.allocator` brings: steps of a small Llama with malloc as it is and tuned, in turns, a process each.

    python scripts/bench_allocator.py [--pairs 3] [--seq-len 2048] [--vocab 32000] [--steps 4]

Prints seconds and page faults a step (best of the steps after warm-up) and the peak resident set, for each pair and
the best of all. One thread; the processes of a pair run one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def measure_steps(tuned: bool, seq_len: int, vocab: int, steps: int, warm_up: int = 2) -> dict[str, float]:
    """Train a few steps in this process; seconds are wall, cpu_seconds user and system time of the process."""
    from recipes.allocator import describe, keep_freed_memory

    if tuned and not keep_freed_memory():
        raise SystemExit(f"malloc was not set: {describe()}")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=seq_len,
    )
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, vocab, (1, seq_len))
    rows = []
    for _ in range(warm_up + steps):
        used, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds, now = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
        cpu = now.ru_utime - used.ru_utime + now.ru_stime - used.ru_stime
        rows.append({"seconds": seconds, "cpu_seconds": cpu, "page_faults": now.ru_minflt - used.ru_minflt})
    best = {key: min(row[key] for row in rows[warm_up:]) for key in rows[0]}
    return best | {"peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def main() -> None:
    """Run the pairs and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--steps", type=int, default=4, help="steps after warm-up")
    parser.add_argument("--child", choices=("default", "tuned"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        sys.path.insert(0, str(ROOT))
        print(json.dumps(measure_steps(args.child == "tuned", args.seq_len, args.vocab, args.steps)))
        return
    ours = ("LD_PRELOAD", "GLIBC_TUNABLES")
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_") and name not in ours}
    env["OMP_NUM_THREADS"] = "1"
    best: dict[str, dict[str, float]] = {}
    for pair in range(args.pairs):
        for malloc in ("default", "tuned"):
            command = [sys.executable, __file__, "--child", malloc]
            command += ["--seq-len", str(args.seq_len), "--vocab", str(args.vocab), "--steps", str(args.steps)]
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
            row = json.loads(done.stdout.splitlines()[-1])
            seen = best.setdefault(malloc, row)
            best[malloc] = {key: min(seen[key], row[key]) for key in row}
            print(f"pair {pair + 1} {malloc:8}", show(row), flush=True)
    for malloc, row in best.items():
        print(f"best   {malloc:8}", show(row))
    print(f"default / tuned: {best['default']['seconds'] / best['tuned']['seconds']:.2f}x the time")


def show(row: dict[str, float]) -> str:
    """One line of figures."""
    return (
        f"{row['seconds']:.3f} s a step ({row['cpu_seconds']:.3f} s CPU), {row['page_faults']:,.0f} page faults, "
        f"peak RSS {row['peak_rss_mib']:,.0f} MiB"
    )


if __name__ == "__main__":
    main()
