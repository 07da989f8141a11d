"""What ranks exchange and how long that takes: bytes against FSDP2's own formula, times against hand-made steps."""

import pytest
import torch
from transformers import LlamaConfig

import ckpt
from ckpt.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Collective
from ckpt.costs import OpCost
from ckpt.hardware import find
from ckpt.links import LINKS, Links, step_time
from ckpt.simulate import Simulator
from ckpt.solver.price import SecondsPrice

L, D, F, V, H, K, E = 4, 64, 128, 256, 4, 2, 16
CONFIG = LlamaConfig(
    vocab_size=V, hidden_size=D, intermediate_size=F, num_hidden_layers=L, num_attention_heads=H,
    num_key_value_heads=K, head_dim=E,
)  # fmt: skip
LAYER = D * E * (2 * H + 2 * K) + 3 * D * F + 2 * D
TOKENS = 128
LINK = Links(node=100e9, network=10e9, node_ranks=4, share=1.0, latency_seconds=0.0)


def collectives(mesh: dict[str, int], *strategies, dtype: str = "bf16") -> list[list[Collective]]:
    simulator = Simulator(CONFIG, ckpt.Workload(seq_len=TOKENS, dtype=dtype, loss="full", mesh=mesh))
    try:
        ran = [simulator.run(strategy).steady for strategy in strategies]
    finally:
        simulator.close()
    return [[row.collective for row in trace.rows if row.collective for _ in range(row.weight)] for trace in ran]


def total(found: list[Collective], kind: str, what: str = "sent_bytes") -> int:
    return sum(getattr(c, what) for c in found if c.kind == kind)


def test_fsdp_gathers_parameters_twice_and_reduces_gradients_once():
    none, full = collectives({"shard": 8}, "none", "full")
    parameters = L * LAYER + 2 * V * D
    # bf16 gathers for forward and backward, but for the root's own (the last norm), which stays; fp32 reductions.
    assert total(full, ALL_GATHER) == 2 * (2 * parameters + D) * 7 // 8
    assert total(full, REDUCE_SCATTER) == 4 * (parameters + D) * 7 // 8
    assert {c.ranks for c in full} == {tuple(range(8))} and not any(c.is_awaited for c in full)
    assert none == full  # a replay uses what backward gathers anyway


@pytest.mark.slow
def test_segments_gather_again_what_they_replay():
    full, segments = collectives({"shard": 8}, "full", ckpt.Segments(size=4))
    assert total(segments, ALL_GATHER) > total(full, ALL_GATHER)
    assert total(segments, REDUCE_SCATTER) == total(full, REDUCE_SCATTER)


@pytest.mark.slow
def test_a_replay_repeats_the_exchanges_of_a_layer():
    none, full = collectives({"sequence": 2}, "none", "full")
    queries, keys = TOKENS // 2 * H * E * 2, TOKENS // 2 * K * E * 2  # bytes of this rank's slice in bf16
    forward = L * (2 * queries + 2 * keys)  # queries and output, keys and values
    assert total(none, ALL_TO_ALL, "num_bytes") == 2 * forward  # backward sends their gradients back
    # the exchange of the output is the last thing a replay needs: nothing after it is saved but what o_proj reads
    assert total(full, ALL_TO_ALL, "num_bytes") == 3 * forward
    assert all(c.is_awaited for c in none if c.kind == ALL_TO_ALL)


@pytest.mark.slow
def test_running_a_collective_again_costs_what_its_link_takes():
    simulator = Simulator(CONFIG, ckpt.Workload(seq_len=TOKENS, mesh={"sequence": 2}))
    try:
        record = simulator.run("full").programs[1].record
    finally:
        simulator.close()
    exchanges = [op for op in record.ops if op.collective is not None]
    assert [op.key.op for op in exchanges] == ["ckpt.exchange"] * 4
    price = SecondsPrice(find("h100"))
    for op in exchanges:
        assert price(op, record) == find("h100").links.seconds(op.collective) > price.device.op_seconds


@pytest.mark.slow
def test_tensor_parallel_layers_reduce_hidden_states_and_their_gradients():
    none, full = collectives({"tensor": 2}, "none", "full")
    hidden = TOKENS * D * 2
    forward = [c for c in none if c.is_awaited]
    assert total(forward, ALL_REDUCE, "num_bytes") == L * 2 * hidden
    assert total([c for c in full if c.is_awaited], ALL_REDUCE) > total(forward, ALL_REDUCE)


def test_time_of_a_collective_is_bytes_over_the_narrowest_link():
    seconds = LINK.seconds
    here, across = (0, 1, 2, 3), tuple(range(8))
    assert seconds(Collective(ALL_GATHER, 4 * 10**9, here, False)) == pytest.approx(3e9 / 100e9)
    assert seconds(Collective(ALL_REDUCE, 4 * 10**9, here, True)) == pytest.approx(2 * 3e9 / 100e9)
    # a ring over two nodes of four ranks crosses by four ports of 10 GB/s
    assert seconds(Collective(REDUCE_SCATTER, 8 * 10**9, across, False)) == pytest.approx(7e9 / 40e9)
    # of an all-to-all, four of eight parts leave, by one port
    assert seconds(Collective(ALL_TO_ALL, 8 * 10**9, across, True)) == pytest.approx(4e9 / 10e9)
    assert seconds(Collective(ALL_GATHER, 2 * 10**9, (0, 4), False)) == pytest.approx(1e9 / 10e9)  # one rank a node


def test_a_gather_hides_behind_the_layer_before_it_and_a_reduction_behind_the_next():
    def run(ops: str, compute: float) -> float:
        """g: gather (1 s), t: take over, r: reduce (1 s), c: copy gradients, x: compute, w: awaited (1 s)."""
        names = {"t": "fsdp.split_with_sizes_copy", "c": "fsdp.chunk_cat"}
        kinds = {"g": (ALL_GATHER, False), "r": (REDUCE_SCATTER, False), "w": (ALL_TO_ALL, True)}
        rows = []
        for op in ops:
            kind = kinds.get(op)
            talk = kind and Collective(kind[0], int(200e9), (0, 1), kind[1])
            shape = (0, names.get(op, op), 0, 0, torch.float32, False, False, (), 1, talk)
            rows.append(OpCost(*shape))
        found = step_time(rows, lambda row: compute if row.op == "x" else 0.0, LINK)
        assert found.compute == compute * ops.count("x")
        return found.exposed

    assert run("gtx", 3) == 1  # nothing to hide the first gather behind
    assert run("gtxgtxgtx", 3) == 1
    assert run("gtxgtxgtx", 0.25) == pytest.approx(1 + 0.75 + 0.75)
    assert run("xcrxcrx", 3) == 1  # the last one, which the optimizer behind it waits for
    assert run("xcrxcr", 0.25) == pytest.approx(0.75 + 1)
    assert run("xwx", 3) == 1  # what a layer waits for is never hidden


@pytest.mark.slow
def test_devices_know_their_links_and_predictions_what_waits():
    assert find("h100").links.node == LINKS["nvlink4"] and find("rtx4090").links.node == find("rtx4090").link_bandwidth
    work = ckpt.Workload(seq_len=TOKENS, mesh={"tensor": 2})
    alone, spread = (ckpt.predict(CONFIG, "full", w, "h100") for w in (work.replace(mesh=None), work))
    assert alone.exposed_seconds == alone.communication_seconds == alone.sent_bytes == 0
    assert spread.sent_bytes > 0 and 0 < spread.exposed_seconds == pytest.approx(spread.communication_seconds)
    assert any("2 ranks a node at 360 GB/s" in line for line in spread.assumptions)
