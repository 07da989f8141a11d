"""What large models would take on 8 and 64 H100: a table of predictions, by mesh and strategy. Nothing was measured.

    OMP_NUM_THREADS=1 PYTHONPATH=. python scripts/many_devices.py [--models 8B,70B] [--devices 8,64]

Each figure is one optimizer step of one rank on fake tensors, over a simulated process group: full fine-tuning with
AdamW, fp32 masters and bf16 compute, one row a data-parallel rank, chunked loss, the MLP of dense models in 16 tiles,
an H100's kernels and links (NVLink 4 in nodes of 8, one 400 Gb/s port a device between them). Figures already in
results/many_devices.json are not made again; docs/many_devices.md is written anew.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, MixtralConfig, PreTrainedConfig

import ckpt
from ckpt.hardware import GIB, find
from ckpt.predict import read
from ckpt.simulate import Simulator

RESULTS, PAGE = Path("results/many_devices.json"), Path("docs/many_devices.md")
K = 1024
LONG = 2**21  # positions: what is predicted is no training recipe
MODELS: dict[str, PreTrainedConfig] = {
    "8B": LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=LONG,
    ),
    "70B": LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=LONG,
    ),
    "141B MoE": MixtralConfig(
        hidden_size=6144, intermediate_size=16384, num_hidden_layers=56, num_attention_heads=48, num_key_value_heads=8,
        num_local_experts=8, num_experts_per_tok=2, vocab_size=32768, max_position_embeddings=LONG, sliding_window=None,
    ),
}  # fmt: skip
NAMES = {"8B": "Llama-3-8B", "70B": "Llama-3-70B", "141B MoE": "Mixtral-8x22B"}
STRATEGIES: dict[str, Any] = {"offload": ckpt.Offload(), "full": "full", "selective": "selective"}
# (model, devices, tokens): meshes.
CASES: dict[tuple[str, int, int], list[dict[str, int]]] = {
    ("8B", 8, 128 * K): [{"shard": 8}, {"sequence": 8}],
    ("8B", 8, 1024 * K): [{"sequence": 8}],
    ("8B", 64, 128 * K): [{"shard": 8, "sequence": 8}],
    ("8B", 64, 1024 * K): [{"shard": 8, "sequence": 8}],
    ("70B", 8, 128 * K): [{"sequence": 8}],
    ("70B", 8, 1024 * K): [{"sequence": 8}],
    ("70B", 64, 128 * K): [{"shard": 8, "sequence": 8}, {"shard": 4, "sequence": 8, "tensor": 2}],
    ("70B", 64, 1024 * K): [{"shard": 8, "sequence": 8}, {"sequence": 64}],
    ("141B MoE", 8, 128 * K): [{"sequence": 8}],
    ("141B MoE", 8, 1024 * K): [{"sequence": 8}],
    ("141B MoE", 64, 128 * K): [{"shard": 8, "sequence": 8}],
    ("141B MoE", 64, 1024 * K): [{"shard": 8, "sequence": 8}, {"shard": 2, "sequence": 32}],
}


def predict_mesh(model: str, devices: int, tokens: int, mesh: dict[str, int]) -> list[dict[str, Any]]:
    """Predict every strategy on one mesh."""
    work = ckpt.Workload(batch_size=1, seq_len=tokens, dtype="bf16", loss="chunked", tile_mlp=16, mesh=mesh)
    if "MoE" in model:
        work = work.replace(tile_mlp=1)
    simulator = Simulator(MODELS[model], work)
    rows = []
    try:
        for name, strategy in STRATEGIES.items():
            p = read(simulator.run(strategy), work, find("h100"))
            num_data = mesh.get("replicate", 1) * mesh.get("shard", 1)
            rows.append(
                {
                    "model": model, "devices": devices, "tokens": tokens, "mesh": mesh, "strategy": name,
                    "peak_bytes": p.peak_bytes, "residents": p.residents, "fits": p.fits, "host_bytes": p.host_bytes,
                    "step_seconds": p.step_seconds, "exposed_seconds": p.exposed_seconds, "sent_bytes": p.sent_bytes,
                    "tokens_per_second": tokens * num_data / p.step_seconds / devices,
                }
            )  # fmt: skip
            if states(rows[-1]) > p.device_bytes:
                break  # nothing that is done with activations can help
    finally:
        simulator.close()
    return rows


def page(rows: list[dict[str, Any]]) -> str:
    """Write the page: of each mesh every strategy, the fastest that fits of a case in bold."""
    lines = [
        "# Predictions for many devices", "",
        "Nothing here was measured: each line is one optimizer step of one rank on fake tensors, by",
        "`OMP_NUM_THREADS=1 PYTHONPATH=. python scripts/many_devices.py`, whose head says what is assumed (80-GB H100,",
        "NVLink within nodes of 8, 400 Gb/s a device between them). Peak: GiB of a device, its kernels and allocator",
        "included, 78.6 to be had. Host: GiB of offloaded layer inputs a rank. Step and tokens/s a device: roofline",
        "estimates. Waits: share of the step in which compute waits for other ranks. Bold: fastest that fits.", "",
    ]  # fmt: skip
    lines += [*summary(rows), ""]
    for model, devices, tokens in CASES:
        mine = [r for r in rows if (r["model"], r["devices"], r["tokens"]) == (model, devices, tokens)]
        if not mine:
            continue
        lines += [f"## {NAMES[model]}, {devices} devices, {tokens // K}K tokens", ""]
        fastest = best(mine)
        lines += ["| mesh | strategy | peak | fits | host | step | waits | tokens/s a device |", "|---" * 8 + "|"]
        for r in mine:
            cells = [spelled(r["mesh"]), f"`{r['strategy']}`", gib(r["peak_bytes"]), "yes" if r["fits"] else "no"]
            cells += [gib(r["host_bytes"]) if r["host_bytes"] else "", f"{r['step_seconds']:,.1f} s"]
            cells += [f"{r['exposed_seconds'] / r['step_seconds']:.1%}", f"{r['tokens_per_second']:,.0f}"]
            lines.append("| " + " | ".join(f"**{c}**" if r is fastest and c else c for c in cells) + " |")
        if fastest is None:
            lines += ["", f"Nothing fits: {least(mine)}."]
        lines.append("")
    return "\n".join(lines)


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """The fastest that fits of each case, or why nothing does; the README has the same."""
    lines = ["| model | devices | tokens a row | mesh | strategy | peak (host) | step | waits |", "|---" * 8 + "|"]
    for model, devices, tokens in CASES:
        mine = [r for r in rows if (r["model"], r["devices"], r["tokens"]) == (model, devices, tokens)]
        if not mine:
            continue
        r = best(mine)
        head = f"| {NAMES[model]} | {devices} | {tokens // K}K |"
        if r is None:
            lines.append(f"{head} does not fit: {least(mine)} | | | | |")
            continue
        host = f" ({gib(r['host_bytes'])})" if r["host_bytes"] else ""
        waits = r["exposed_seconds"] / r["step_seconds"]
        lines.append(
            f"{head} {spelled(r['mesh'])} | `{r['strategy']}` | {gib(r['peak_bytes'])}{host} | "
            f"{r['step_seconds']:,.1f} s | {waits:.1%} |"
        )
    return lines


def least(rows: list[dict[str, Any]]) -> str:
    """What of rows that do not fit stands in the way."""
    row = min(rows, key=lambda r: r["peak_bytes"])
    if states(row) > row["peak_bytes"] / 2:
        return f"{gib(states(row))} GiB of states a device"
    return f"{gib(row['peak_bytes'])} GiB a device at least"


def states(row: dict[str, Any]) -> int:
    """Bytes that a step holds from its start to its end."""
    return sum(row["residents"][name] for name in ("parameters", "gradients", "optimizer_state"))


def best(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The row with most tokens a second of those that fit."""
    return max((r for r in rows if r["fits"]), key=lambda r: r["tokens_per_second"], default=None)


def spelled(mesh: dict[str, int]) -> str:
    """A mesh as the README writes it."""
    return " x ".join(f"`{name}` {degree}" for name, degree in mesh.items())


def gib(num_bytes: int) -> str:
    """Bytes in GiB."""
    return f"{num_bytes / GIB:,.1f}"


def main() -> None:
    """Make what is missing, then the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--devices", default="8,64")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    known = {(r["model"], r["devices"], r["tokens"], spelled(r["mesh"])) for r in rows}
    for (model, devices, tokens), meshes in CASES.items():
        if model not in asked.models.split(",") or str(devices) not in asked.devices.split(","):
            continue
        for mesh in meshes:
            if (model, devices, tokens, spelled(mesh)) in known:
                continue
            made = predict_mesh(model, devices, tokens, mesh)
            rows += made
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
            for r in made:
                print(model, devices, tokens, mesh, r["strategy"], gib(r["peak_bytes"]), f"{r['step_seconds']:.1f} s")
    PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
