"""FLOPs and bytes of single ops, against integers computed by hand and torch's own counter where that is right."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ckpt.flops import CAUSAL_CONVENTION, FlopCounter, op_bytes_moved, op_flops
from ckpt.flops_attention import attention_layout, flex_attention_flops, fused_attention_flops, twice_pairs

aten = torch.ops.aten


def counted(function, *args):
    with FlopCounter() as counter:
        function(*args)
    return counter


def torch_counts(function, *args):
    with FlopCounterMode(display=False) as counter:
        function(*args)
    return counter.get_total_flops()


def brute_force_pairs(queries, keys, *, causal, left=0, bottom_right=False):
    """Query-key pairs with the diagonal counted half, by enumeration."""
    offset = keys - queries if bottom_right else 0
    total = 0.0
    for i in range(queries):
        for j in range(keys):
            distance = i + offset - j
            if causal and distance < 0:
                continue
            weight = 0.5 if causal and distance == 0 else 1.0
            if left and distance >= left:
                weight = 0.5 if distance == left else 0.0
            total += weight
    return total


@pytest.mark.parametrize(
    ("function", "shapes", "flops"),
    [
        (torch.mm, [(2, 3), (3, 5)], 2 * 2 * 3 * 5),
        (torch.addmm, [(5,), (2, 3), (3, 5)], 2 * 2 * 3 * 5),
        (torch.bmm, [(4, 2, 3), (4, 3, 5)], 4 * 2 * 2 * 3 * 5),
        (torch.baddbmm, [(4, 2, 5), (4, 2, 3), (4, 3, 5)], 4 * 2 * 2 * 3 * 5),
        (torch.addbmm, [(2, 5), (4, 2, 3), (4, 3, 5)], 4 * 2 * 2 * 3 * 5),
        (torch.mv, [(7, 3), (3,)], 2 * 7 * 3),
        (torch.addmv, [(7,), (7, 3), (3,)], 2 * 7 * 3),
        (torch.dot, [(9,), (9,)], 18),
        (F.linear, [(2, 4, 3), (5, 3), (5,)], 2 * 8 * 3 * 5),
        (torch.sin, [(100,)], 0),
    ],
)
def test_matmuls_count_two_flops_a_multiply_add(function, shapes, flops):
    assert counted(function, *(torch.randn(s) for s in shapes)).total == flops


@pytest.mark.parametrize(
    ("a", "b", "flops"),
    [
        ((6, 8), (3, 8, 16), 2 * 6 * 8 * 16),  # groups split the rows
        ((3, 6, 8), (8, 48), 2 * 6 * 8 * 48),  # groups split the columns
        ((6, 24), (24, 16), 2 * 6 * 24 * 16),  # groups split the sum
        ((3, 6, 8), (3, 8, 16), 3 * 2 * 6 * 8 * 16),  # plain batch
    ],
)
def test_grouped_mm_counts_each_layout_once(a, b, flops):
    assert op_flops(aten._grouped_mm.default, (torch.randn(a), torch.randn(b)), {}, None) == flops


def test_grouped_mm_is_counted_in_a_run():
    a, b = torch.randn(6, 8, dtype=torch.bfloat16), torch.randn(3, 8, 16, dtype=torch.bfloat16)
    offs = torch.tensor([2, 4, 6], dtype=torch.int32)
    assert counted(lambda: torch._grouped_mm(a, b, offs=offs)).by_op == {"aten._grouped_mm": 2 * 6 * 8 * 16}


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_convolution_backward_costs_two_forwards_with_groups_too(groups):
    x = torch.randn(2, 4, 9, requires_grad=True)
    conv = torch.nn.Conv1d(4, 8, 3, groups=groups)
    with FlopCounter() as counter:
        y = conv(x)
        forward = counter.total
        y.sum().backward()
    assert forward == 2 * 2 * 7 * (8 * (4 // groups) * 3)
    assert counter.total == 3 * forward


def test_transposed_convolution_backward_costs_two_forwards():
    x = torch.randn(2, 4, 9, requires_grad=True)
    conv = torch.nn.ConvTranspose1d(4, 8, 3)
    with FlopCounter() as counter:
        y = conv(x)
        forward = counter.total
        y.sum().backward()
    assert forward == 2 * 2 * 9 * (4 * 8 * 3)
    assert counter.total == 3 * forward


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (8, 3), (3, 8), (1, 8)])
def test_pairs_equal_enumeration(queries, keys, causal, bottom_right):
    got = twice_pairs(queries, keys, causal=causal, bottom_right=bottom_right)
    assert got == 2 * brute_force_pairs(queries, keys, causal=causal, bottom_right=bottom_right)


@pytest.mark.parametrize("left", [1, 3, 8, 20])
def test_a_window_cuts_the_far_triangle(left):
    assert twice_pairs(8, 8, causal=True, left=left) == 2 * brute_force_pairs(8, 8, causal=True, left=left)
    assert twice_pairs(3, 8, causal=True, left=left, bottom_right=True) == 2 * brute_force_pairs(
        3, 8, causal=True, left=left, bottom_right=True
    )


def test_causal_flash_on_cpu_counts_half_forward_and_two_and_a_half_times_that_backward():
    q, k, v = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))
    with FlopCounter() as counter:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        forward = counter.total
        out.sum().backward()
    assert forward == 2 * (16 * 16 // 2) * 2 * (8 + 8)
    assert counter.total - forward == forward * 5 // 2
    assert "half" in CAUSAL_CONVENTION


def test_full_flash_counts_what_torch_counts_for_cuda_flash():
    q, k, v = torch.randn(2, 4, 16, 8), torch.randn(2, 2, 24, 8), torch.randn(2, 2, 24, 8)
    formula = torch.utils.flop_counter.flop_registry[aten._scaled_dot_product_flash_attention]
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    # A head of keys and values that serves several queries counts for each; torch 2.11 wants it repeated.
    each_k, each_v = (t.repeat_interleave(2, dim=1) for t in (k, v))
    assert op_flops(flash, (q, k, v), {}, None) == formula(q, each_k, each_v)
    backward = torch.utils.flop_counter.flop_registry[aten._scaled_dot_product_flash_attention_backward]
    args = (torch.randn_like(q), q, k, v, q, q[..., 0], 0.0, False)
    assert op_flops(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, args, {}, None) == backward(
        q, q, each_k, each_v
    )


def test_math_attention_counts_its_full_matmuls():
    q, k, v = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        counter = counted(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert counter.by_op == {"aten.bmm": 2 * 16 * 16 * 2 * (8 + 8)}


def test_value_heads_of_another_size_count_by_their_own_size():
    q, k, v = torch.randn(1, 2, 16, 8), torch.randn(1, 2, 16, 8), torch.randn(1, 2, 16, 6)
    name = "aten::_scaled_dot_product_efficient_attention"
    values = {"query": q, "key": k, "value": v, "is_causal": True}
    assert fused_attention_flops(name, values) == 2 * (16 * 16 // 2) * 2 * (8 + 6)
    assert fused_attention_flops(name + "_backward", values) == 2 * (16 * 16 // 2) * 2 * (3 * 8 + 2 * 6)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "heads first"),
        ("aten::_scaled_dot_product_fused_attention_overrideable", "heads first"),
        ("ckpt::packed_attention", "heads first"),
        ("ckpt::packed_attention_backward", "heads first"),
        ("aten::_flash_attention_forward", "tokens first"),
        ("aten::_efficient_attention_backward", "tokens first"),
        ("torch_attn::_varlen_attn", "tokens first"),
        ("flash_attn::_flash_attn_varlen_backward", "tokens first"),
        ("_flash_attn2_cuda_f12afc9::varlen_fwd", "tokens first"),
        ("_flash_attn2_cuda_f12afc9::fwd_kvcache", None),
        ("aten::mm", None),
        ("aten::native_layer_norm_backward", None),
    ],
)
def test_attention_is_recognised_by_name(name, layout):
    assert attention_layout(name) == layout


def test_hub_flash_attention_counts_documents_windows_and_causality():
    tokens, heads, size = 12, 2, 8
    q, k, v = torch.randn(tokens, heads, size), torch.randn(tokens, 1, size), torch.randn(tokens, 1, size)
    bounds = torch.tensor([0, 4, 12], dtype=torch.int32)
    values = {"q": q, "k": k, "v": v, "cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 8}
    name = "_flash_attn2_cuda_f12afc9::varlen_fwd"
    factor = heads * (size + size)
    assert fused_attention_flops(name, values | {"is_causal": True}) == factor * (4 * 4 + 8 * 8)
    assert fused_attention_flops(name, values | {"is_causal": False}) == factor * 2 * (4 * 4 + 8 * 8)
    # window_size_left counts the keys beside the query's own: 2 means 3 keys
    windowed = values | {"is_causal": True, "window_size_left": 2, "window_size_right": 0}
    assert fused_attention_flops(name, windowed) == factor * ((16 - 1) + (64 - 25))
    assert fused_attention_flops(name, values | {"is_causal": True, "window_size_left": -1}) == factor * 80
    dense = {"q": q[None], "k": k[None], "v": v[None], "causal": True}
    assert fused_attention_flops("flash_attn::_flash_attn_forward", dense) == factor * 12 * 12
    assert fused_attention_flops("flash_attn::_flash_attn_backward", dense) == heads * 12 * 12 * 5 * size


def packed(q, k, v, bounds, **settings):
    named = {"query": q, "key": k, "value": v, "bounds": bounds, "sinks": None, "max_length": 16, "window": 0}
    return fused_attention_flops("ckpt::packed_attention", named | settings)


def test_packed_attention_counts_each_document_alone():
    q, k, v = torch.randn(2, 4, 16, 8), torch.randn(2, 2, 16, 8), torch.randn(2, 2, 16, 8)
    bounds = torch.tensor([0, 10, 16, 32, 32, 32], dtype=torch.int32)
    factor = 4 * (8 + 8)
    assert packed(q, k, v, bounds) == factor * (10 * 10 + 6 * 6 + 16 * 16)
    assert packed(q, k, v, bounds, window=4) == factor * (100 - 36 + 36 - 4 + 256 - 144)


def test_packed_attention_with_unknown_bounds_is_one_document_a_row():
    q, k, v = torch.randn(2, 4, 16, 8), torch.randn(2, 2, 16, 8), torch.randn(2, 2, 16, 8)
    with FakeTensorMode():
        bounds = torch.empty(6, dtype=torch.int32)
    assert packed(q, k, v, bounds) == 2 * 4 * 16 * 16 * (8 + 8)
    assert packed(q, k, v, bounds, max_length=5) == 2 * 4 * (3 * 25 + 1) * (8 + 8)


def block_mask(partial, whole, block, queries=256):
    none = (None,) * 6
    return (queries, queries, partial, partial, whole, whole, *none, block, block, None)


def test_flex_attention_reads_its_block_mask():
    q = torch.randn(1, 2, 256, 16)
    partial = torch.ones(1, 1, 2, dtype=torch.int32)
    whole = torch.tensor([[[0, 1]]], dtype=torch.int32)
    args = (q, q, q, None, block_mask(partial, whole, 128), 1.0, {})
    assert flex_attention_flops("flex_attention", args, {}) == 2 * 256 * 256 * (16 + 16)
    unmasked = (q, q, q, None, block_mask(torch.ones(1, 1, 1, dtype=torch.int32), None, 1 << 30), 1.0, {})
    assert flex_attention_flops("flex_attention", unmasked, {}) == 2 * 2 * 256 * 256 * (16 + 16)
    with FakeTensorMode() as fake:
        masked = (q, q, q, None, block_mask(fake.from_tensor(partial), fake.from_tensor(whole), 128), 1.0, {})
    assert flex_attention_flops("flex_attention_backward", masked, {}) == 2 * 256 * 256 * 5 * 16


class _Calls(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


def call_of(packet, function):
    with _Calls() as mode:
        function()
    return next(c for c in mode.calls if getattr(c[0], "overloadpacket", c[0]) is packet)


def test_a_step_counts_as_torch_counts_it_without_attention():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    x = torch.randn(5, 8, requires_grad=True)

    def step():
        net(x).sum().backward()

    assert counted(step).total == torch_counts(step) == 3 * 2 * 5 * (8 * 16 + 16 * 4)


def test_fake_and_real_steps_count_the_same():
    def step():
        w = torch.ones(8, 8, requires_grad=True)
        q = (torch.ones(2, 16, 8) @ w).view(1, 2, 16, 8)
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()

    real = counted(step).by_op
    with FakeTensorMode():
        assert counted(step).by_op == real


def test_inference_mode_counts_like_training():
    net, x = torch.nn.Linear(8, 4), torch.randn(2, 3, 8)
    with torch.inference_mode():
        assert counted(net, x).total == 2 * 6 * 8 * 4


def test_replay_counts_again():
    w, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)

    def step(checkpointed):
        def layer(x):
            return (x @ w).sin()

        h = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        h.sum().backward()

    matmul = 2 * 4 * 8 * 8
    assert counted(step, False).total == 3 * matmul
    assert counted(step, True).total == 4 * matmul


def test_sharded_tensors_count_this_ranks_share():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (4,))
    a = distribute_tensor(torch.randn(8, 3), mesh, [Shard(0)])
    b = distribute_tensor(torch.randn(3, 5), mesh, [Replicate()])
    assert counted(torch.mm, a, b).by_op == {"aten.mm": 2 * 2 * 3 * 5}


def test_bytes_moved_are_inputs_and_results_once():
    def moved(packet, function):
        func, args, kwargs, out = call_of(packet, function)
        return op_bytes_moved(func, args, out, kwargs)

    a, b = torch.randn(2, 3), torch.randn(3, 5)
    assert moved(aten.mm, lambda: a @ b) == 4 * (6 + 15 + 10)
    assert moved(aten.mm, lambda: torch.mm(a, b, out=torch.empty(2, 5))) == 4 * (6 + 15 + 10)
    assert moved(aten.add, lambda: a + a.new_zeros(1, 3).expand(2, 3)) == 4 * (6 + 3 + 6)
    assert moved(aten.add_, lambda: a.clone().add_(a)) == 4 * (6 + 6 + 6)
    assert moved(aten.copy_, lambda: torch.empty(2, 3).copy_(a)) == 4 * (6 + 6)
    assert moved(aten.zeros_like, lambda: torch.zeros_like(a)) == 4 * 6
    assert moved(aten.view, lambda: a.view(3, 2)) == 0
    assert moved(aten.empty, lambda: torch.empty(1000)) == 0
    table, rows = torch.randn(100, 8), torch.tensor([1, 2, 3])
    assert moved(aten.embedding, lambda: F.embedding(rows, table)) == 4 * 3 * 8 + 8 * 3 + 4 * 3 * 8
