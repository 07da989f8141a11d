"""Paired step times of the chunked loss beside full logits: head and loss alone, in one process, on one thread.

    python scripts/bench_loss.py [--repeats 7] [--tokens 2048,8192] [--hidden 256,1024] [--chunk 512] [--dtype fp32]

The model is a Llama of no layers: embedding, norm, head, loss and their backward, so that nothing hides the difference.
Times are CPU seconds of the one thread, which other work on the machine disturbs least. Each round times both variants,
in alternating order; a ratio is taken within a round, and the median and the interquartile range of the ratios are
printed.
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

from ckpt.engine.loss import attach_chunked_loss  # noqa: E402

VOCAB = 32_000
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def headless_llama(hidden: int, num_tokens: int, dtype: torch.dtype) -> LlamaForCausalLM:
    """A Llama with no decoder layer, vocab 32,000, embedding and head untied."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=0,
        num_attention_heads=4,
        vocab_size=VOCAB,
        max_position_embeddings=num_tokens,
    )
    return LlamaForCausalLM(config).to(dtype).train()


def seconds_of_step(model: LlamaForCausalLM, tokens: torch.Tensor) -> float:
    """CPU seconds of one forward and backward."""
    model.zero_grad(set_to_none=True)
    start = time.thread_time()
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    return time.thread_time() - start


def compare(hidden: int, num_tokens: int, args: argparse.Namespace) -> None:
    """Print one line: seconds of a step with full logits and with chunks, and their ratio."""
    model = headless_llama(hidden, num_tokens, DTYPES[args.dtype])
    tokens = torch.randint(0, VOCAB, (1, num_tokens))
    full, chunked, ratios = [], [], []
    for round_index in range(args.repeats + 1):
        times = {}
        for variant in ("full", "chunked") if round_index % 2 else ("chunked", "full"):
            attached = attach_chunked_loss(model, chunk_tokens=args.chunk) if variant == "chunked" else None
            times[variant] = seconds_of_step(model, tokens)
            if attached:
                assert attached.report()["mode"] == "chunked", attached.report()
                attached.undo()
        if round_index:  # the first one warms up
            full.append(times["full"])
            chunked.append(times["chunked"])
            ratios.append(times["chunked"] / times["full"])
    low, _, high = statistics.quantiles(ratios, n=4)
    print(
        f"hidden {hidden:5d}  tokens {num_tokens:5d}  {args.dtype}  full {min(full):7.3f} s  "
        f"chunked {min(chunked):7.3f} s  ratio {statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]",
        flush=True,
    )


def main() -> None:
    """Compare at every size asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", default="2048,4096,8192")
    parser.add_argument("--hidden", default="256,1024")
    parser.add_argument("--chunk", type=int, default=None, help="tokens a chunk; default: chosen by shape")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, vocab {VOCAB}, chunk_tokens {args.chunk or 'by shape'}, {args.repeats} rounds")
    for hidden in map(int, args.hidden.split(",")):
        for num_tokens in map(int, args.tokens.split(",")):
            compare(hidden, num_tokens, args)


if __name__ == "__main__":
    main()
