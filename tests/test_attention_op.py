"""The op `ckpt::packed_attention`: values and gradients against dense attention, and what dispatch modes see of it."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt.attention import blocks, bounds, flash, kernels, packed_attention
from ckpt.attention.interface import attend

EDGES = [0, 5, 5, 100, 200, 201, 202, 400, 400]  # two rows of 200: 5, 95 and 100 tokens; 1, 1 and 198; three empty ones


def inputs(dtype=torch.float64, *, batch=2, heads=4, kv_heads=2, tokens=200, size=8, value_size=8, sinks=False, seed=0):
    gen = torch.Generator().manual_seed(seed)

    def make(n, width):
        x = torch.randn(batch, tokens, n, width, generator=gen, dtype=torch.float64).to(dtype)
        return x.transpose(1, 2).requires_grad_()  # as projections leave it

    sink = torch.randn(heads, generator=gen, dtype=torch.float64).to(dtype).requires_grad_() if sinks else None
    return make(heads, size), make(kv_heads, size), make(kv_heads, value_size), sink


def dense(q, k, v, edges, sinks=None, scale=0.3, window=0, softcap=0.0):
    """Attention with a block-diagonal (B, 1, T, T) mask: what the op must equal."""
    batch, heads, tokens, _ = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    document = torch.searchsorted(torch.tensor(edges), torch.arange(batch * tokens), right=True).view(batch, 1, tokens)
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    seen = (distance >= 0) & ((distance < window) if window else True)
    seen = seen & (document[..., :, None] == document[..., None, :])
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(batch, heads, tokens, 1)], -1)
    return (scores.softmax(-1)[..., :tokens] @ v).transpose(1, 2)


def packed(q, k, v, edges=EDGES, sinks=None, scale=0.3, window=0, softcap=0.0):
    return packed_attention(q, k, v, torch.tensor(edges, dtype=torch.int32), sinks, q.shape[2], scale, window, softcap)[
        0
    ]


def largest(found, wanted):
    return max(float((a - b).detach().abs().max()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("window", [0, 3, 70, 128])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("size", "value_size"), [(8, 8), (12, 8), (8, 12)])
def test_values_and_gradients_equal_a_dense_block_diagonal_mask(size, value_size, sinks, window, softcap):
    q, k, v, s = inputs(size=size, value_size=value_size, sinks=sinks)
    out, reference = packed(q, k, v, EDGES, s, 0.3, window, softcap), dense(q, k, v, EDGES, s, 0.3, window, softcap)
    wanted = [q, k, v] + ([s] if sinks else [])
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    grads, references = (torch.autograd.grad(x, wanted, grad) for x in (out, reference))
    assert largest([out], [reference]) < 1e-12
    assert largest(grads, references) < 1e-12


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_as_close_to_float64_as_dense_attention_is(dtype, window, softcap):
    low = inputs(dtype, sinks=True)
    high = [x.detach().double().requires_grad_() for x in low]
    out = packed(*low[:3], EDGES, low[3], 0.3, window, softcap)
    own = dense(*low[:3], EDGES, low[3], 0.3, window, softcap)
    exact = dense(*high[:3], EDGES, high[3], 0.3, window, softcap)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    grads, owns = (torch.autograd.grad(x, low, grad) for x in (out, own))
    exacts = torch.autograd.grad(exact, high, grad.double())
    for mine, theirs, true in zip([out, *grads], [own, *owns], [exact, *exacts], strict=True):
        assert mine.dtype == dtype
        error, allowed = ((x.detach().double() - true).norm() / true.norm() for x in (mine, theirs))
        assert error <= 1.5 * allowed + torch.finfo(dtype).eps


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_gradcheck(softcap):
    q, k, v, s = inputs(batch=1, heads=2, kv_heads=1, tokens=9, size=3, value_size=2, sinks=True)
    assert torch.autograd.gradcheck(lambda *x: packed(*x[:3], [0, 4, 4, 9], x[3], 0.7, 3, softcap), (q, k, v, s))


@pytest.mark.parametrize(("size", "value_size", "sinks", "softcap"), [(8, 8, False, 0.0), (12, 8, True, 2.0)])
def test_opcheck(size, value_size, sinks, softcap):
    """Schema, autograd registration, fake run and AOT dispatch, as torch checks custom ops."""
    q, k, v, s = inputs(torch.float32, batch=2, tokens=20, size=size, value_size=value_size, sinks=sinks)
    edges = torch.tensor([0, 7, 20, 40, 40], dtype=torch.int32)
    torch.library.opcheck(packed_attention, (q, k, v, edges, s, 20, 0.3, 6, softcap))


@pytest.mark.parametrize("edges", [EDGES, [0, 200, 400], [0, *range(10, 401, 10)]])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (16, 0.0), (16, 5.0)])
@pytest.mark.parametrize("layout", ["projected", "contiguous"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_fake_run_has_the_shapes_strides_and_dtypes_of_a_real_one(edges, window, softcap, layout, dtype):
    def run(mode=None):
        made = inputs(dtype, size=12, value_size=8, sinks=True)
        if layout == "contiguous":
            made = [x.detach().contiguous().requires_grad_() for x in made]
        made = [mode.from_tensor(x) if mode else x for x in made]
        starts = torch.tensor(edges, dtype=torch.int32)
        starts = mode.from_tensor(starts) if mode else starts
        out, lse = packed_attention(*made[:3], starts, made[3], 200, 0.3, window, softcap)
        with torch.no_grad():
            grads = torch.ops.ckpt.packed_attention_backward(
                torch.ones_like(out), *made[:3], out, lse, starts, made[3], 200, 0.3, window, softcap
            )
        return [(x.shape, x.stride(), x.dtype) for x in (out, lse, *grads)]

    assert run() == run(FakeTensorMode())


class Ops(TorchDispatchMode):
    """Records the name of every op that a dispatch mode sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def seen(edges):
    q, k, v, _ = inputs(torch.float32)
    with Ops() as ops:
        packed(q, k, v, edges).sum().backward()
    return ops.names


def test_the_ops_that_a_mode_sees_do_not_depend_on_the_documents():
    one, few, many = seen([0, 200, 400]), seen([0, 50, 200, 400]), seen([0, *range(4, 401, 4)])
    assert one == few == many
    assert one.count("ckpt::packed_attention") == one.count("ckpt::packed_attention_backward") == 1
    assert not [name for name in one if "scaled_dot_product" in name or "mm" in name]


class Flash:
    """Stands in for torch's flash ops and remembers what they were given."""

    def __init__(self, monkeypatch):
        self.calls, ops = [], flash.aten

        class Spied:
            def __getattr__(_, name):
                def call(*args, **kwargs):
                    mask = kwargs.get("attn_mask")
                    causal = args[7] if name.endswith("backward") else args[4]
                    queries = args[1].shape[2] if name.endswith("backward") else args[0].shape[2]
                    self.calls.append(
                        (name.endswith("backward"), queries, causal, None if mask is None else tuple(mask.shape))
                    )
                    return getattr(ops, name)(*args, **kwargs)

                return call

        monkeypatch.setattr(flash, "aten", Spied())


def test_each_document_runs_flash_once_without_any_mask(monkeypatch):
    spy = Flash(monkeypatch)
    q, k, v, _ = inputs(torch.float32)
    packed(q, k, v).sum().backward()
    lengths = [b - a for a, b in itertools.pairwise(EDGES) if b > a]
    assert spy.calls == [(back, n, True, None) for back in (False, True) for n in lengths]


def test_rows_of_one_document_run_flash_once_for_all(monkeypatch):
    spy = Flash(monkeypatch)
    q, k, v, _ = inputs(torch.float32)
    packed(q, k, v, [0, 200, 400, 400]).sum().backward()
    assert spy.calls == [(False, 200, True, None), (True, 200, True, None)]


def test_a_window_needs_a_band_of_chunk_by_window_at_most(monkeypatch):
    spy = Flash(monkeypatch)
    q, k, v, _ = inputs(torch.float32, batch=1, tokens=2000)
    packed(q, k, v, [0, 2000], window=100).sum().backward()
    masks = [shape for *_, shape in spy.calls if shape]
    assert masks and max(a * b for a, b in masks) <= 64 * 163 < 2000 * 2000 / 300


def test_plain_math_never_holds_more_scores_than_its_block(monkeypatch):
    largest_seen = []
    monkeypatch.setattr(blocks, "ELEMENTS", 4 * 2 * 200)
    original = blocks._scores

    def spy(*args):
        scores, tanh = original(*args)
        largest_seen.append(scores.numel())
        return scores, tanh

    monkeypatch.setattr(blocks, "_scores", spy)
    q, k, v, _ = inputs()
    out = packed(q, k, v, [0, 200, 400], softcap=5.0)
    assert largest([out], [dense(q, k, v, [0, 200, 400], softcap=5.0)]) < 1e-12
    assert max(largest_seen) <= blocks.ELEMENTS and len(largest_seen) == 200


def test_the_log_sum_exp_carries_no_gradient():
    q, k, v, _ = inputs()
    _, lse = packed_attention(q, k, v, torch.tensor(EDGES, dtype=torch.int32), None, 200, 0.3, 0, 0.0)
    assert lse.shape == (4, 400) and not lse.requires_grad


@pytest.mark.parametrize(
    ("edges", "match"),
    [
        ([0, 200], "must rise from 0 to batch . tokens = 400"),
        ([5, 200, 400], "must rise from 0"),
        ([0, 300, 200, 400], "must rise from 0"),
        ([0, 150, 250, 400], "across the end of row 0"),
    ],
)
def test_boundaries_that_do_not_fit_are_refused(edges, match):
    q, k, v, _ = inputs()
    with pytest.raises(ValueError, match=match):
        packed(q, k, v, edges)


def test_heads_that_do_not_share_out_are_refused():
    """Stock attention raises a size error; a kernel that reads heads by division would give some of them none."""
    q, k, v, _ = inputs(heads=3, kv_heads=2)
    with pytest.raises(ValueError, match=r"3 heads of queries for 2 of keys.*num_key_value_heads"):
        attend(torch.nn.Identity(), q, k, v, None)


# ---------------------------------------------------------------- variable-length flash, without the device


class Varlen:
    """FlashAttention's variable-length entry in plain torch, by its documented contract."""

    def _flash_attention_forward(self, q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale, **window):
        assert q.ndim == 3 and q.shape[-1] % 8 == 0 and q.shape[-1] == k.shape[-1] == v.shape[-1]
        assert cu_q is cu_k and cu_q.dtype == torch.int32 and causal and not debug and dropout == 0.0
        assert window in ({}, {"window_size_left": 69, "window_size_right": 0})
        spec = kernels.Spec(scale, window.get("window_size_left", -1) + 1)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
        for a, b in itertools.pairwise(cu_q.tolist()):
            if a < b:
                assert b - a <= max_q == max_k
                o, z = blocks.forward(*(x[a:b].transpose(0, 1)[None] for x in (q, k, v)), spec)
                out[a:b], lse[:, a:b] = o[0].transpose(0, 1), z[0]
        return out, lse, None, None, None

    def _flash_attention_backward(
        self, grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng, unused, *, scale, **window
    ):
        spec = kernels.Spec(scale, window.get("window_size_left", -1) + 1)
        grads = [torch.empty_like(x) for x in (q, k, v)]
        for a, b in itertools.pairwise(cu_q.tolist()):
            if a < b:
                one = [x[a:b].transpose(0, 1)[None] for x in (grad, q, k, v, out)]
                for whole, part in zip(grads, blocks.backward(*one, lse[None, :, a:b], spec), strict=True):
                    whole[a:b] = part[0].transpose(0, 1)
        return grads


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("size", "value_size"), [(8, 8), (12, 8), (8, 12)])
def test_the_call_of_variable_length_flash_keeps_its_contract(monkeypatch, size, value_size, sinks, window):
    """Rows are flattened, head sizes padded, and everything put back: on CUDA only the kernel itself is another."""
    monkeypatch.setattr(kernels, "choose", lambda *_: "varlen")
    monkeypatch.setattr(flash, "aten", Varlen())
    q, k, v, s = inputs(size=size, value_size=value_size, sinks=sinks)
    out, reference = packed(q, k, v, EDGES, s, 0.3, window), dense(q, k, v, EDGES, s, 0.3, window)
    wanted = [q, k, v] + ([s] if sinks else [])
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    grads, references = (torch.autograd.grad(x, wanted, grad) for x in (out, reference))
    assert largest([out], [reference]) < 1e-12 and largest(grads, references) < 1e-12


@pytest.mark.parametrize(
    ("device", "dtype", "size", "softcap", "kernel"),
    [
        ("cpu", torch.float32, 64, 0.0, "flash_cpu"),
        ("cpu", torch.bfloat16, 64, 50.0, "math"),
        ("cuda", torch.bfloat16, 128, 0.0, "varlen"),
        ("cuda", torch.float16, 256, 0.0, "varlen"),
        ("cuda", torch.bfloat16, 512, 0.0, "math"),
        ("cuda", torch.float32, 128, 0.0, "math"),
        ("cuda", torch.bfloat16, 128, 50.0, "math"),
    ],
)
def test_the_kernel_follows_device_dtype_head_size_and_soft_cap(device, dtype, size, softcap, kernel):
    class Like:
        def __init__(self):
            self.device, self.dtype, self.shape = torch.device(device), dtype, (1, 2, 3, size)

    assert kernels.choose(Like(), Like(), softcap) == kernel


# ---------------------------------------------------------------- boundaries


def test_boundaries_are_read_off_positions():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [5, 6, 7, 8, 0, 1]])
    found = bounds.from_positions(positions, 2)
    assert found.dtype == torch.int32 and found.unique().tolist() == [0, 3, 5, 6, 10, 12]
    assert bounds.from_positions(torch.arange(6)[None], 2).unique().tolist() == [0, 6, 12]


def test_a_row_without_a_start_is_refused():
    with pytest.raises(ValueError, match=r"rows start at \[6\]"):
        bounds.from_starts([0, 3], 2, 6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu_values_and_gradients_equal_the_cpu(dtype, window):
    made = inputs(dtype, size=64, value_size=64, sinks=True)
    out = packed(*made[:3], EDGES, made[3], 0.1, window)
    on_gpu = [x.detach().cuda().requires_grad_() for x in made]
    starts = torch.tensor(EDGES, dtype=torch.int32, device="cuda")
    far, _ = packed_attention(*on_gpu[:3], starts, on_gpu[3], 200, 0.1, window, 0.0)
    grads, fars = torch.autograd.grad(out.sum(), made), torch.autograd.grad(far.sum(), on_gpu)
    for a, b in zip([out, *grads], [far, *fars], strict=True):
        assert (a.detach() - b.detach().cpu()).norm() <= (0.02 if dtype == torch.bfloat16 else 1e-4) * a.detach().norm()
