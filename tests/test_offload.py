"""What is kept may live off the device: bitwise, in two halves a layer, within the room there is."""

from __future__ import annotations

import time
from types import SimpleNamespace

import exactness
import pytest
import torch
import zoo
from engine_kit import Layer, Stack, assert_exact, built
from torch.utils._python_dispatch import TorchDispatchMode

import ckpt
from ckpt.engine import halves, liveness, media
from ckpt.engine.media import NoRoom
from ckpt.engine.store import Store

TARGETS = ["host", "disk"]


@pytest.fixture
def small_parts(monkeypatch):
    """Replay in parts whatever their size."""
    for module in (liveness, halves):
        monkeypatch.setattr(module, "MIN_BYTES_TO_SPLIT", 0)


def attention_ops(name: str = "_scaled_dot_product_flash_attention_for_cpu"):
    class Count(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func._schema.name == f"aten::{name}"
            return func(*args, **(kwargs or {}))

    return Count()


# ---- exact: case 16 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("what", ["inputs", "kept"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "gpt2"])
def test_16_offload_is_bitwise(small_parts, name, what, target):
    model = zoo.build(name, dropout=0.1 if name == "gpt2" else 0.0, layers=4)
    plain = exactness.baseline(model, [zoo.batch(model, n, seed=n) for n in (16, 13)])
    strategy = ckpt.Offload(target, what, keep="attention+matmul+moe")
    exactness.compare(model, plain, lambda m: ckpt.apply(m, strategy)).raise_if_wrong()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in zoo.names() if name not in {*zoo.KNOWN_UNBUILDABLE, "reformer"}])
def test_16_halves_are_bitwise_in_every_family(small_parts, name):
    """About three seconds each on an idle core."""
    model = zoo.build(name)
    plain = exactness.baseline(model, [zoo.batch(model, n, seed=n) for n in (16, 13)])
    exactness.compare(model, plain, lambda m: ckpt.apply(m, ckpt.Offload())).raise_if_wrong()


class Views(Layer):
    """Saves views, slices and transposes of shared storages, of several dtypes."""

    def forward(self, x):
        h = self.a(x)
        left, right = h.chunk(2, dim=-1)  # one storage, two saved slices
        mixed = (left.transpose(0, 1) * right.transpose(0, 1)).transpose(0, 1)
        narrow = h[:, 1:-1].to(torch.float64).sin()[..., ::2].float()
        diagonal = h.unfold(-1, 3, 2).sin().sum((-1, -2))
        wide = self.b(torch.cat([mixed, mixed.flip(-1)], -1))
        return x + wide + narrow.sum() * diagonal[..., None] + h.expand_as(h).cos()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("what", ["inputs", "kept"])
def test_16_views_slices_transposes_and_shared_storages_come_back_as_they_were(what, target):
    strategy = ckpt.Offload(target, what, keep="*")
    assert_exact(lambda: Stack(*[Views() for _ in range(3)]), strategy, (3, 6, 8), steps=3)


def test_16_a_store_takes_whole_storages_of_any_shape_and_dtype():
    for target in TARGETS:
        store = Store(target)
        base = torch.arange(60, dtype=torch.int16).view(3, 4, 5)
        tickets = [(t, store.put(t, store.open_group())) for t in (
            base, base[1:, ::2].transpose(0, 2), torch.zeros(0), torch.randn(7, dtype=torch.float64)[::3],
            torch.randn(4, 4, dtype=torch.bfloat16).t(), torch.tensor(True), base.unfold(1, 2, 1),
        )]  # fmt: skip
        store.end_of_forward()
        for tensor, ticket in tickets:
            back = ticket.view(tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
            assert torch.equal(back, tensor) and back.stride() == tensor.stride()
        del tickets, ticket, back
        assert store.bytes_now == 0
        store.close()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("with_backward", [True, False])
def test_16_nothing_grows_over_50_steps(small_parts, tmp_path, target, with_backward):
    model = zoo.build("llama", layers=2)
    handle = ckpt.apply(model, ckpt.Offload(target, directory=str(tmp_path) if target == "disk" else None), tile_mlp=2)
    inputs = zoo.batch(model, 16)
    sizes = []
    for _ in range(50):
        loss = model(**inputs).loss
        if with_backward:
            loss.backward()
            model.zero_grad(set_to_none=True)
        del loss
        store = handle.store
        sizes.append((store.bytes_now, store.peak_bytes, store._slot_bytes, sum(map(len, store._pool.values()))))
    assert set(sizes[2:]) == {sizes[2]}
    assert sizes[-1][0] == 0 and sizes[-1][1] == 2 * 2 * 16 * model.config.hidden_size * 4  # halves, rows, tokens


# ---- the two halves of a layer ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiles", [1, 2])
def test_halves_are_replayed_apart_and_the_attention_once(small_parts, tiles):
    model = zoo.build("llama", layers=3)
    handle = ckpt.apply(model, ckpt.Offload(), tile_mlp=tiles)
    inputs = zoo.batch(model, 16)
    for _ in range(2):
        with attention_ops() as seen:
            model(**inputs).loss.backward()
        assert seen.count == 2 * 3  # forward, and one replay
    audit = handle.audit()
    assert [layer.middle for layer in audit.layers] == ["/add#0"] * 3
    assert "halves replayed apart, at /add#0" in str(audit)
    halves_away, last = [layer.away_bytes for layer in audit.layers[:2]], audit.layers[2]
    hidden = 2 * 16 * model.config.hidden_size * 4
    assert halves_away == [2 * hidden] * 2 and last.away_bytes == 0 and last.kept_bytes == hidden
    # The output projection is not run again: nobody behind it asks.
    runs = {op.key.path for op in (handle.regions[0].latest.record.ops[i] for s in stages(handle) for i in s.runs)}
    assert "self_attn.q_proj" in runs and "self_attn.o_proj" not in runs


def stages(handle):
    return handle.regions[0].latest.stages


def test_the_working_sets_of_the_halves_are_never_alive_together(small_parts):
    """Measured on a layer whose halves are alike: apart, the peak falls by most of one half."""
    model = small_llama()
    inputs = {"input_ids": torch.zeros(1, 512, dtype=torch.long)}
    peaks = {}
    for name, middle in (("together", False), ("apart", True)):
        handle = ckpt.apply(model, ckpt.Offload())
        for region in handle.regions:
            region.middle = region.middle if middle else ckpt.plan.Decision.RECOMPUTE
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            with ckpt.measure(model) as ledger:
                model(**inputs, use_cache=False).last_hidden_state.sum().backward()
        peaks[name] = ledger.peak_bytes
        handle.undo()
    hidden = 512 * 64 * 4
    assert peaks["together"] - peaks["apart"] >= 4 * hidden


def small_llama():
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    return LlamaModel(LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=64, attn_implementation="sdpa",
    )).train()  # fmt: skip


@pytest.mark.parametrize(("name", "dropout", "why"), [
    ("gpt2", 0.1, "it draws random numbers"),
    ("bloom", 0.0, "values may pass by the record"),
    ("falcon", 0.0, "no single tensor parts it"),
])  # fmt: skip
def test_layers_that_have_no_halves_are_replayed_whole_and_say_why(small_parts, name, dropout, why):
    model = zoo.build(name, dropout=dropout, layers=2)
    handle = ckpt.apply(model, ckpt.Offload())
    inputs = zoo.batch(model, 16)
    exactness.loss_of(model(**inputs), inputs).backward()
    audit = handle.audit()
    assert {layer.no_middle_because for layer in audit.layers} == {why}
    assert f"halves replayed together: {why}" in str(audit)


def test_a_plan_read_off_a_handle_holds_the_middle(small_parts, tmp_path):
    model = zoo.build("llama", layers=3)
    inputs = zoo.batch(model, 16)
    handle = ckpt.apply(model, ckpt.Offload())
    model(**inputs).loss.backward()
    model.zero_grad(set_to_none=True)
    handle.plan().save(tmp_path / "plan.json")
    away = [layer.away_bytes for layer in handle.audit().layers]
    handle.undo()
    handle = ckpt.apply(model, ckpt.Plan.load(tmp_path / "plan.json"))
    model(**inputs).loss.backward()
    assert [layer.away_bytes for layer in handle.audit().layers] == away and away[0] > 0


# ---- room, counts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_too_little_room_is_told_in_the_first_layer_for_all_layers(small_parts, monkeypatch, target):
    model = zoo.build("llama", layers=4)
    inputs = zoo.batch(model, 16)
    layer_bytes = 2 * 2 * 16 * model.config.hidden_size * 4
    free = int(layer_bytes * 2.25)  # of three layers that offload
    monkeypatch.setattr(media, "available_memory", lambda: free)
    monkeypatch.setattr(media.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    handle = ckpt.apply(model, ckpt.Offload(target))
    with pytest.raises(NoRoom, match=r"do not fit .*free.*\(3 layers offload 0\.\d+ MiB each\.\)"):
        model(**inputs)
    assert handle.audit().layers[1].calls == 0


def test_room_is_asked_for_what_the_buffers_do_not_hold_yet(monkeypatch):
    monkeypatch.setattr(media, "available_memory", lambda: 1000)
    store = Store("host")
    store.check_room(1000)
    with pytest.raises(NoRoom, match="Offload to disk"):
        store.check_room(1001)
    ticket = store.put(torch.zeros(500, dtype=torch.uint8), store.open_group())
    store.check_room(1500)
    del ticket
    store.check_room(1500)  # the buffer is pooled


def test_a_container_s_limit_counts(tmp_path):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 50\n")
    assert media._of_container(str(tmp_path)) == 350
    (tmp_path / "memory.max").write_text("max\n")
    assert media._of_container(str(tmp_path)) is None


def test_the_audit_and_the_ledger_tell_host_and_disk_apart(small_parts):
    model = zoo.build("llama", layers=3)
    inputs = zoo.batch(model, 16)
    hidden = 2 * 16 * model.config.hidden_size * 4
    for target in TARGETS:
        handle = ckpt.apply(model, ckpt.Offload(target))
        model(**inputs).loss.backward()
        with ckpt.measure(model, inputs=inputs) as ledger:
            model(**inputs).loss.backward()
        away = handle.audit().offload
        assert (away.target, away.moved_bytes, away.peak_bytes) == (target, 2 * 4 * hidden, 4 * hidden)
        assert away.stall_seconds >= 0
        assert (ledger.host_bytes, ledger.disk_bytes) == ((4 * hidden, 0) if target == "host" else (0, 4 * hidden))
        assert f"offloaded to {target}: " in str(handle.audit())
        handle.undo()


def test_what_comes_back_is_asked_for_one_group_ahead():
    """Fetching a layer's middle starts bringing its input back, and that the middle of the layer before."""
    store = Store("host")
    tickets = [store.put(torch.full((4,), float(n)), store.open_group()) for n in range(4)]
    tickets[3].fetch()
    assert [ticket._ready is not None for ticket in tickets] == [False, False, True, False]
    tickets[2].fetch()
    assert [ticket._ready is not None for ticket in tickets] == [False, True, False, False]


def test_stalls_are_counted(monkeypatch):
    store = Store("disk")
    ticket = store.put(torch.zeros(1000), store.open_group())
    store.end_of_forward()
    read = store._medium.read

    class Slow:
        def __init__(self, event):
            self.event = event

        def result(self):
            time.sleep(0.02)
            return self.event.result()

    monkeypatch.setattr(store._medium, "read", lambda *args: Slow(read(*args)))
    ticket.fetch()
    assert store.stall_seconds >= 0.02


def test_where_nothing_is_offloaded_nothing_is_said_of_it():
    handle = ckpt.apply(built(lambda: Stack(Layer(), Layer())), "full")
    assert handle.audit().offload is None and "offloaded" not in str(handle.audit())
