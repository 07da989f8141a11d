"""The ledger counts every storage once, as an unobserved step holds it, and gives each to the right resident."""

import contextlib
import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import ckpt.ledger
from ckpt.flops import FlopCounter
from ckpt.ledger import current, measure, split_allocated
from ckpt.timeline import PHASES, RESIDENTS

F32 = 4


class Residual(nn.Module):
    """Blocks of h + up(sin(down(h))), each replayed in backward if `replay`."""

    def __init__(self, width=32, inner=48, blocks=3, replay=False):
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(width, inner, bias=False) for _ in range(blocks))
        self.up = nn.ModuleList(nn.Linear(inner, width, bias=False) for _ in range(blocks))
        self.replay = replay

    def forward(self, h):
        for down, up in zip(self.down, self.up, strict=True):

            def block(h, down=down, up=up):
                return h + up(down(h).sin())

            h = checkpoint(block, h, use_reentrant=False, preserve_rng_state=False) if self.replay else block(h)
        return h


class Fan(nn.Module):
    """One tensor used four times: backward joins four gradients of its size, its peak."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1000))

    def forward(self, x):
        h = self.w * x
        return sum((h * i).sum() for i in (2.0, 3.0, 4.0, 5.0))


class AddsInBackward(nn.Module):
    """A backward that sums two tensors of its own making: that sum is out of place in every run."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            return grad.expand(1000) * 2 + grad.expand(1000) * 3

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1000))

    def forward(self, x):
        return self.Function.apply(self.w)


def step_of(model, x, optimizer=None):
    def step():
        model(x).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return step


def allocator_growth(step):
    """Peak growth in bytes of what the CPU allocator handed out during a step: no dispatch mode is active."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    changes = []

    def visit(event):
        if event.tag == torch._C._profiler._EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
        for child in event.children:
            visit(child)

    for root in profiler.profiler.kineto_results.experimental_event_tree():
        visit(root)
    assert changes
    return max(np.cumsum([size for _, size in sorted(changes, key=lambda change: change[0])]))


def assert_same(ledger, allocated):
    """The ledger's growth is the allocator's, but for the scalars that kernels make inside."""
    assert 0 <= allocated - (ledger.peak_bytes - ledger.start_bytes) <= 64


def param_bytes(model):
    return sum(p.numel() * p.element_size() for p in model.parameters())


# -- the total --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("held", [False, True], ids=["gradients-none", "gradients-held"])
@pytest.mark.parametrize("tokens", [2, 64])
def test_peak_equals_what_the_allocator_hands_out_to_an_unobserved_step(replay, held, tokens):
    model, x = Residual(blocks=6, replay=replay), torch.randn(tokens, 32)
    step = step_of(model, x)
    step()

    def prepare():
        if not held:
            model.zero_grad()

    prepare()
    expected = allocator_growth(step)
    prepare()
    with measure(model, inputs=x) as ledger:
        step()
    assert_same(ledger, expected)


@pytest.mark.parametrize("net", [Fan, AddsInBackward])
def test_joined_gradients_count_as_autograd_joins_them_unobserved(net):
    model, x = net(), torch.ones(1000)

    def step():
        model(x).backward()

    step()
    model.zero_grad()
    expected = allocator_growth(step)
    model.zero_grad()
    with measure(model, inputs=x) as ledger:
        step()
    assert_same(ledger, expected)


@pytest.mark.parametrize("kind", ["loop", "foreach", "fused"])
@pytest.mark.parametrize("first", [True, False], ids=["first-step", "later-step"])
def test_peak_holds_with_an_optimizer_step_of_each_kind(kind, first):
    def make():
        torch.manual_seed(0)
        model, x = Residual(width=96, inner=128), torch.randn(2, 96)  # few tokens: the optimizer's peak
        flags = {"foreach": kind == "foreach", "fused": kind == "fused"}
        optimizer = torch.optim.AdamW(model.parameters(), **flags)
        if not first:
            step_of(model, x, optimizer)()
        return model, x, optimizer

    model, x, optimizer = make()
    expected = allocator_growth(step_of(model, x, optimizer))
    model, x, optimizer = make()
    with measure(model, optimizer, inputs=x) as ledger:
        step_of(model, x, optimizer)()
    state = sum(t.numel() * F32 for s in optimizer.state.values() for t in s.values())
    assert_same(ledger, expected)
    assert ledger.end_bytes - ledger.start_bytes == (state if first else 0)
    if kind == "foreach":  # the one that holds scratch for all parameters at once
        assert ledger.peak_phase == "optimizer"
        assert ledger.residents["optimizer_state"] == state
        assert ledger.residents["gradients"] == param_bytes(model)
        assert ledger.residents["workspace"] >= param_bytes(model)


def test_a_flop_counter_inside_changes_nothing():
    model, x = Residual(replay=True), torch.randn(64, 32)
    step = step_of(model, x)
    step()
    model.zero_grad()
    with measure(model, inputs=x) as alone:
        step()
    model.zero_grad()
    with measure(model, inputs=x) as beside, FlopCounter() as counter:
        step()
    assert counter.total > 0
    assert (alone.full_timeline.bytes == beside.full_timeline.bytes).all()


@pytest.mark.parametrize("watch", [measure, lambda model: FlopCounter()], ids=["ledger", "flop-counter"])
def test_a_watched_step_computes_the_same_bits(watch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.LayerNorm(48), nn.Dropout(0.2), nn.Linear(48, 8), nn.GELU())
    x = torch.randn(64, 32)

    def gradients(context):
        torch.manual_seed(1)
        model.zero_grad()
        with context:
            hidden = model(x)
            (hidden.softmax(-1) * hidden).sum().backward()
        return [p.grad for p in model.parameters()]

    plain = gradients(contextlib.nullcontext())
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(watch(model)), strict=True))


@pytest.mark.parametrize("replay", [False, True])
def test_fake_and_real_steps_give_one_timeline(replay):
    def run(fake):
        with fake:
            torch.manual_seed(0)
            model, x = Residual(replay=replay), torch.ones(64, 32)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            with measure(model, optimizer, inputs=x) as ledger:
                step_of(model, x, optimizer)()
        return ledger

    real, fake = run(contextlib.nullcontext()), run(FakeTensorMode())
    assert real.residents == fake.residents
    assert (real.full_timeline.bytes == fake.full_timeline.bytes).all()
    assert (real.full_timeline.phase == fake.full_timeline.phase).all()


def test_views_and_aliases_count_once():
    model = nn.Linear(4, 4)
    with measure(model) as ledger:
        before = ledger.live_bytes
        base = torch.zeros(1000)
        views = [base[10:], base.view(10, 100).t(), base.detach(), base.expand(5, 1000), nn.Parameter(base), base.data]
        assert ledger.live_bytes - before == 1000 * F32
        del base
        assert ledger.live_bytes - before == 1000 * F32
        del views
        assert ledger.live_bytes == before


def test_tied_weights_count_once():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    with measure(model) as ledger:
        pass
    assert ledger.residents["parameters"] == ledger.peak_bytes == 64 * F32


def test_sizes_follow_resizes_in_place():
    with measure(nn.Linear(4, 4)) as ledger:
        before = ledger.live_bytes
        x = torch.zeros(100)
        x.resize_(400)
        assert ledger.live_bytes - before == 400 * F32
        x.untyped_storage().resize_(0)
        assert ledger.live_bytes == before
        x.untyped_storage().resize_(40)
        assert ledger.live_bytes - before == 40
        torch.add(torch.ones(50), 1, out=x)
        assert ledger.live_bytes - before == 50 * F32
    assert "resize_" not in vars(torch.UntypedStorage)


def test_sparse_gradients_count_their_indices_and_values():
    table = nn.Embedding(1000, 8, sparse=True)
    with measure(table) as ledger:
        table(torch.tensor([1, 2, 3])).sum().backward()
    at_end = dict(zip(RESIDENTS, ledger.full_timeline.bytes[-1], strict=True))
    assert at_end["gradients"] == 3 * 8 * F32 + 3 * 8


def test_the_ledger_keeps_no_tensor_alive():
    model = nn.Linear(8, 8)
    with measure(model, inputs=(given := torch.randn(2, 8))) as ledger:
        out = model(given)
        seen = [weakref.ref(t) for t in (out, given)]
        del out, given
        assert [ref() for ref in seen] == [None, None]
    assert ledger.end_bytes == param_bytes(model)


def test_sharded_parameters_count_their_shard_and_their_gathered_copies():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (4,)))
    fully_shard(model)
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(4, 64)
    step = step_of(model, x, optimizer)
    step()
    expected = allocator_growth(step)
    with measure(model, optimizer, inputs=x) as ledger:
        step()
    assert ledger.residents["parameters"] == 3 * 64 * 64 * F32 // 4
    assert_same(ledger, expected)
    assert ledger.end_bytes == ledger.start_bytes


def test_scratch_inside_a_python_op_is_seen_on_real_tensors_alone():
    from ckpt.attention import packed_attention

    class Attention(nn.Module):
        def forward(self, x):
            bounds = torch.tensor([0, 40, 64, 128], dtype=torch.int32) if known else x.new_empty(4, dtype=torch.int32)
            return packed_attention(x, x, x, bounds, None, 64, 0.25, 0, 30.0)[0].sum()

    def run():
        x = torch.ones(2, 4, 64, 16).requires_grad_()
        with measure(Attention(), inputs=x) as ledger:
            Attention()(x).backward()
        return ledger, x

    known = True
    real, x = run()
    x.grad = None
    assert_same(real, allocator_growth(lambda: Attention()(x).backward()))
    known = False
    with FakeTensorMode():
        fake, _ = run()
    assert real.peak_bytes - fake.peak_bytes > 4 * 40 * 40 * F32  # at least a document's scores
    assert fake.end_bytes == real.end_bytes


def test_shapes_that_a_dtensor_works_out_are_no_memory():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (4,))
    for fake in (contextlib.nullcontext(), FakeTensorMode()):
        with fake:
            a = distribute_tensor(torch.ones(400, 3), mesh, [Shard(0)])
            b = distribute_tensor(torch.ones(3, 50), mesh, [Replicate()])
            with measure(nn.Identity(), inputs=(a, b)) as ledger:
                c = a @ b
        assert c.shape == (400, 50)
        assert ledger.peak_bytes - ledger.start_bytes == 100 * 50 * F32


# -- the split --------------------------------------------------------------------------------------------------------


def test_residents_sum_to_the_peak_and_the_timeline_to_both():
    model, x = Residual(replay=True), torch.randn(64, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    with measure(model, optimizer, inputs=x) as ledger:
        step_of(model, x, optimizer)()
    assert list(ledger.residents) == list(RESIDENTS)
    assert sum(ledger.residents.values()) == ledger.peak_bytes == ledger.timeline.total.max()
    assert (ledger.full_timeline.bytes >= 0).all()


def test_one_linear_layer_by_hand():
    model, x = nn.Linear(8, 16, bias=False), torch.randn(100, 8, requires_grad=False)
    with measure(model, inputs={"x": [x]}) as ledger:
        model(x).backward(torch.ones(100, 16))
    assert ledger.residents["parameters"] == 8 * 16 * F32
    assert ledger.residents["gradients"] == 8 * 16 * F32
    assert ledger.residents["activations"] == (100 * 8 + 2 * 100 * 16) * F32  # x, the output, the ones
    assert ledger.residents["workspace"] == 0


def test_inputs_count_from_the_start_if_given_and_from_their_first_use_if_not():
    model, x = nn.Linear(8, 8), torch.randn(100, 8)
    with measure(model, inputs={"x": x}) as given:
        model(x)
    with measure(model) as found:
        model(x)
    assert given.start_bytes - found.start_bytes == x.numel() * F32
    assert given.residents == found.residents


def test_gradients_are_found_whether_stolen_cloned_accumulated_or_held():
    model, x = Residual(), torch.randn(16, 32)
    with measure(model, inputs=x) as ledger:
        step_of(model, x)()
    assert ledger.full_timeline.bytes[-1, 1] == param_bytes(model)
    with measure(model, inputs=x) as ledger:
        step_of(model, x)()
    assert (ledger.full_timeline.bytes[:, 1] == param_bytes(model)).all()  # added in place
    with measure(model, inputs=x) as ledger:
        step_of(model, x)()
        model.zero_grad()
    assert ledger.full_timeline.bytes[0, 1] == param_bytes(model)
    assert ledger.full_timeline.bytes[-1, 1] == 0
    with measure(model, inputs=x) as ledger:  # come and gone inside, and no optimizer tells of them
        step_of(model, x)()
        model.zero_grad()
    assert ledger.full_timeline.bytes[:, 1].max() == param_bytes(model)
    shared = nn.Linear(32, 32, bias=False)  # used twice: the two contributions are summed, then handed over
    with measure(shared, inputs=x) as ledger:
        shared(shared(x)).sum().backward()
    assert ledger.full_timeline.bytes[-1, 1] == param_bytes(shared)


def test_a_gradient_made_in_forward_is_a_gradient_from_then_on():
    class Eager(torch.autograd.Function):  # as a chunked loss does: the head's gradient is summed up in forward
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(torch.ones_like(weight))
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            return None, ctx.saved_tensors[0]

    model = nn.Linear(16, 16, bias=False)
    model.forward = lambda x: Eager.apply(x, model.weight)
    with measure(model) as ledger:
        model(torch.randn(4, 16)).backward()
    forward = ledger.full_timeline.phase == PHASES.index("forward")
    assert ledger.full_timeline.bytes[forward, 1].max() == 16 * 16 * F32


def test_replayed_layers_are_workspace_and_their_inputs_activations():
    tokens, width, inner, blocks = 256, 32, 256, 3
    x = torch.randn(tokens, width, requires_grad=True)

    def run(replay):
        model = Residual(width, inner, blocks, replay)
        with measure(model, inputs=x) as ledger:
            model(x).sum().backward()
        return ledger

    def at_end_of_forward(ledger):
        last = np.flatnonzero(ledger.full_timeline.phase == 0)[-1]
        return int(ledger.full_timeline.bytes[last, 3])

    kept, replayed = run(False), run(True)
    hidden, wide, scalars = tokens * width * F32, tokens * inner * F32, 2 * F32  # the loss and its gradient
    assert at_end_of_forward(kept) == hidden * (blocks + 1) + blocks * 2 * wide + scalars - hidden
    assert at_end_of_forward(replayed) == hidden * blocks + scalars
    assert replayed.peak_phase == "backward"
    assert replayed.residents["workspace"] >= 2 * wide
    assert replayed.residents["workspace"] > kept.residents["workspace"]
    assert replayed.peak_bytes < kept.peak_bytes


class MasterWeights:
    """A wrapper in the field's manner: bf16 parameters, fp32 copies that an inner optimizer updates."""

    def __init__(self, model):
        self.pairs = [(p, nn.Parameter(p.detach().float())) for p in model.parameters()]
        self.inner = torch.optim.AdamW([master for _, master in self.pairs])

    @torch.no_grad()
    def step(self):
        for p, master in self.pairs:
            master.grad = p.grad.float()
            p.grad = None
        self.inner.step()
        for p, master in self.pairs:
            p.copy_(master)
            master.grad = None


def test_master_weights_are_optimizer_state_and_their_gradients_gradients():
    model = Residual().bfloat16()
    n = sum(p.numel() for p in model.parameters())
    optimizer, x = MasterWeights(model), torch.randn(2, 32, dtype=torch.bfloat16)
    with measure(model, optimizer, inputs=x) as ledger:
        model(x).sum().backward()
        optimizer.step()
    assert dict(zip(RESIDENTS, ledger.full_timeline.bytes[0], strict=True)) == {
        "parameters": 2 * n, "gradients": 0, "optimizer_state": 4 * n, "activations": x.numel() * 2, "workspace": 0,
    }  # fmt: skip
    steps = len(optimizer.pairs) * F32
    assert ledger.full_timeline.bytes[-1, 2] == 12 * n + steps
    in_step = ledger.full_timeline.phase == PHASES.index("optimizer")
    assert ledger.full_timeline.bytes[in_step, 1].max() == 4 * n + 2 * model.up[-1].weight.numel()
    assert "step" not in vars(optimizer)


def test_several_optimizers_and_what_they_hold_are_seen():
    model, x = Residual(blocks=2), torch.randn(4, 32)
    optimizers = [torch.optim.SGD(model.down.parameters(), momentum=0.9), torch.optim.AdamW(model.up.parameters())]
    with measure(model, optimizers, inputs=x) as ledger:
        model(x).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    down, up = param_bytes(model.down), param_bytes(model.up)
    assert ledger.full_timeline.bytes[-1, 2] == down + 2 * up + 2 * F32
    assert [phase for phase, *_ in ledger.timeline.spans()] == ["forward", "backward", "optimizer"]


# -- phases -----------------------------------------------------------------------------------------------------------


def test_phases_follow_micro_batches_clipping_and_the_optimizer():
    model = Residual()
    optimizer = torch.optim.AdamW(model.parameters())
    with measure(model, optimizer) as ledger:
        for _ in range(2):
            x = torch.randn(64, 32)
            loss = model(x).square().mean()
            loss.backward()
            logged = loss.detach() * 1
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    spans = ledger.timeline.spans()
    assert [phase for phase, *_ in spans] == ["forward", "backward", "forward", "backward", "optimizer"]
    assert spans[0][1] == 0 and spans[-1][2] == len(ledger.timeline) - 1
    assert all(a[2] + 1 == b[1] for a, b in zip(spans, spans[1:], strict=False))
    assert logged.numel() == 1
    second = ledger.full_timeline.spans()[2][1]
    made = (64 * 32 + 64 * 48) * F32  # the second batch, though it was made after the first backward, and down(x)
    assert ledger.full_timeline.bytes[second, 3] >= made


def test_forwards_that_nobody_announces_are_recognised():
    model = Residual()
    with measure(model) as ledger:
        for _ in range(2):
            h = torch.randn(8, 32)
            for down, up in zip(model.down, model.up, strict=True):  # the module's own __call__ is never used
                h = h + up(down(h).sin())
            h.sum().backward()
    assert [phase for phase, *_ in ledger.timeline.spans()] == ["forward", "backward"] * 2


# -- opening and closing ----------------------------------------------------------------------------------------------


def hooks_of(model, optimizer):
    hooks = [model._forward_pre_hooks, model._forward_hooks, optimizer._optimizer_step_pre_hooks]
    hooks += [optimizer._optimizer_step_post_hooks, *(p._post_accumulate_grad_hooks or {} for p in model.parameters())]
    return sum(map(len, hooks))


def test_an_error_inside_leaves_partial_results_and_no_hooks():
    model, x = Residual(), torch.randn(8, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(KeyError), measure(model, optimizer, inputs=x) as ledger:
        model(x).sum().backward()
        raise KeyError
    assert ledger.peak_bytes > ledger.start_bytes
    assert ledger.residents["activations"] > 0
    assert hooks_of(model, optimizer) == 0
    assert current() is None
    with measure(model, optimizer, inputs=x) as again:
        step_of(model, x, optimizer)()
    assert again.peak_bytes > again.start_bytes


def test_an_error_in_forward_does_not_leave_the_forward_open():
    model = Residual()
    with measure(model) as ledger:
        with pytest.raises(RuntimeError):
            model(torch.randn(8, 31))
        model(torch.randn(8, 32)).sum().backward()
        later = torch.zeros(10)
    assert later is not None
    assert [phase for phase, *_ in ledger.timeline.spans()] == ["forward", "backward"]


def test_fifty_uses_leave_nothing_behind():
    model, x = Residual(replay=True), torch.randn(8, 32)
    optimizer = torch.optim.AdamW(model.parameters())

    def use():
        with measure(model, optimizer, inputs=x) as ledger:
            step_of(model, x, optimizer)()
        return ledger.peak_bytes

    def count():
        gc.collect()
        return len(gc.get_objects())

    peak = (use(), use())[1]
    before = count()
    assert {use() for _ in range(50)} == {peak}
    assert count() - before < 50
    assert hooks_of(model, optimizer) == 0


def test_a_second_ledger_inside_the_first_is_an_error():
    model = nn.Linear(4, 4)
    with measure(model) as outer:
        assert current() is outer
        with pytest.raises(ValueError, match="open already"), measure(model):
            pass
        model(torch.randn(2, 4))
    assert outer.peak_bytes > outer.start_bytes


def test_a_ledger_measures_one_step_and_reads_only_when_open():
    ledger = measure(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="not open"):
        ledger.live_bytes  # noqa: B018
    with ledger:
        pass
    with pytest.raises(ValueError, match="one step"), ledger:
        pass


def test_position_is_the_present_moments_place_in_the_timeline():
    model = Residual()
    with measure(model) as ledger:
        assert ledger.position == 0
        kept = model(torch.randn(8, 32))
        at, live = ledger.position, ledger.live_bytes
        kept.sum().backward()
    assert ledger.full_timeline.total[at] == live


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ValueError, match=r"nn\.Module"):
        measure(lambda x: x)
    with pytest.raises(ValueError, match="meta"):
        measure(nn.Linear(4, 4, device="meta"))
    with pytest.raises(ValueError, match=r"without step\(\)"):
        measure(nn.Linear(4, 4), object())
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].compile()
    with pytest.raises(ValueError, match="compiled"):
        measure(model)


def test_offloaded_bytes_count_on_the_host_and_not_on_the_device():
    model = nn.Linear(4, 4)
    with measure(model) as ledger:
        current().note_host(1000)
        kept = torch.zeros(256)
        ledger.count_as_host(kept)
        assert ledger.live_bytes == ledger.start_bytes if hasattr(ledger, "start_bytes") else param_bytes(model)
        ledger.note_host(-1000)
        del kept
        assert ledger.live_bytes == param_bytes(model)
    assert ledger.host_bytes == 1000 + 256 * F32
    assert ledger.peak_bytes == param_bytes(model)


def test_the_allocators_peak_is_split_by_the_ledger_with_the_rest_as_workspace(monkeypatch):
    tracked = {"parameters": 10, "gradients": 5, "optimizer_state": 20, "activations": 40, "workspace": 2}
    assert split_allocated(tracked, 100) == tracked | {"workspace": 25}
    assert split_allocated(tracked, 70) == tracked  # memory that the allocator does not own
    calls = []
    for name, value in {"synchronize": None, "reset_peak_memory_stats": None, "max_memory_allocated": 5000,
                        "max_memory_reserved": 8192}.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name, value=value: calls.append(name) or value)
    model = nn.Linear(4, 4)
    ledger = measure(model)
    ledger._has_allocator = True
    with ledger:
        assert calls == ["synchronize", "reset_peak_memory_stats"]
    assert (ledger.peak_bytes, ledger.peak_allocated_bytes, ledger.peak_reserved_bytes) == (5000, 5000, 8192)
    assert ledger.tracked_peak_bytes == param_bytes(model)
    assert ledger.residents["workspace"] == 5000 - param_bytes(model)


def test_the_timeline_is_bounded_and_keeps_its_peak(monkeypatch):
    monkeypatch.setattr(ckpt.ledger, "MAX_TIMELINE_POINTS", 50)
    model, x = Residual(blocks=8), torch.randn(64, 32)
    with measure(model, inputs=x) as ledger:
        step_of(model, x)()
    assert len(ledger.timeline) <= 50 < len(ledger.full_timeline)
    assert ledger.timeline.total.max() == ledger.peak_bytes
    assert ledger.timeline.event[0] == 0 and ledger.timeline.event[-1] == len(ledger.full_timeline) - 1
    assert [phase for phase, *_ in ledger.timeline.spans()] == ["forward", "backward"]
    with pytest.raises(ValueError, match="at least 3"):
        ledger.timeline.thin(2)
