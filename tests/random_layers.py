"""Layers made of random ops, written as a short program for each seed.

    layer = RandomLayer(seed=7, kind="values")

Everything that a layer may do to the engine is in the vocabulary: views, writes in place (through views too), kernels
with several outputs, random ops, values that reach Python, kernels that the dispatcher does not see, buffers. The
hidden states stay (B, T, WIDTH) all the way, so any instruction may follow any other. Some programs torch refuses.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from engine_kit import WIDTH, Layer
from torch import Tensor, nn

PURE = (
    "unary unary unary binary binary linear linear module attend inplace overwrite on_linear view slice_ softmax norm "
    "chunk topk sdpa"
)
VOCABULARY = {
    "pure": (PURE + " detach no_grad").split(),
    "random": (PURE + " dropout dropout noise bernoulli_").split(),
    "values": (PURE + " dropout item tolist nonzero own_function buffer foreach").split(),
}

UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.sin, torch.cos, torch.tanh, torch.sigmoid, torch.neg, F.gelu, F.relu, F.silu,
    lambda t: t * 2, lambda t: t + 1, lambda t: t.clamp(-2, 2).exp(),
]  # fmt: skip
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add, torch.mul, torch.sub, torch.maximum, lambda s, t: torch.lerp(s, t, 0.3)
]  # fmt: skip


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.sin()
        ctx.save_for_backward(x, y)
        return y * x

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return gradient * (y + x * x.cos())


class RandomLayer(Layer):
    """A layer whose forward interprets a random program over the values made so far."""

    def __init__(self, seed: int, kind: str):
        super().__init__(bias=seed % 2 == 1)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        rng = random.Random(f"{seed} {kind}")
        self.program = []
        for count in range(1, rng.randrange(5, 19)):
            name = rng.choice(VOCABULARY[kind])
            first, second = rng.randrange(count), rng.randrange(count)
            if name == "overwrite" and first == 0:
                name = "inplace"  # the layer's input is not its own to write into
            self.program.append((name, first, second, rng.randrange(1000)))
        last = len(self.program)
        self.result = last, rng.randrange(max(0, last - 3), last + 1)
        self.returns_tuple = rng.random() < 0.3

    def forward(self, x):
        values = [x]
        for name, i, j, choice in self.program:
            values.append(getattr(self, f"do_{name}")(values[i], values[j], choice))
        first, second = (values[k] for k in self.result)
        out = torch.tanh(first + second * 0.1)
        return (out, values[-1]) if self.returns_tuple else out

    def do_unary(self, a, b, choice):
        return UNARY[choice % len(UNARY)](a)

    def do_binary(self, a, b, choice):
        return BINARY[choice % len(BINARY)](a, b)

    def do_linear(self, a, b, choice):
        return F.linear(a, (self.a, self.b)[choice % 2].weight)

    def do_module(self, a, b, choice):
        return (self.a, self.b)[choice % 2](a)

    def do_attend(self, a, b, choice):
        return torch.bmm(torch.bmm(a, b.transpose(1, 2)), a) * 0.1

    def do_sdpa(self, a, b, choice):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (a, b, a))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)

    def do_inplace(self, a, b, choice):
        return self.do_overwrite(a.clone() if choice % 2 else a * 1, b, choice)

    def do_overwrite(self, a, b, choice):
        """Write into a value of this layer, whatever else reads it."""
        return [
            lambda: a.add_(b),
            lambda: a.mul_(0.5),
            lambda: torch.relu_(a),
            lambda: a.copy_(b),
            lambda: a.sub_(b, alpha=2),
        ][choice % 5]()

    def do_on_linear(self, a, b, choice):
        h = self.a(a)
        h += b
        return h * 2 if choice % 2 else h

    def do_slice_(self, a, b, choice):
        out = a.clone()
        if choice % 2:
            out[:, 1:] += b[:, 1:]
        else:
            out[..., 0] = b[..., 1]
        return out

    def do_view(self, a, b, choice):
        return [
            lambda: a.transpose(1, 2).contiguous().transpose(1, 2),
            lambda: a.reshape(-1, WIDTH).view_as(a),
            lambda: a.unflatten(-1, (2, -1)).flatten(-2),
            lambda: a.view(a.shape),
        ][choice % 4]()

    def do_softmax(self, a, b, choice):
        return a.softmax(-1 if choice % 2 else 1)

    def do_norm(self, a, b, choice):
        return self.norm(a)

    def do_chunk(self, a, b, choice):
        left, right = a.chunk(2, -1)
        return torch.cat([right.sin(), left * right], -1)

    def do_topk(self, a, b, choice):
        weights, indices = a.topk(3, -1)
        return b.scatter_add(-1, indices, weights)

    def do_detach(self, a, b, choice):
        return a.detach() * b

    def do_no_grad(self, a, b, choice):
        with torch.no_grad():
            gate = (a.sin() + b) * 2
        return gate * a

    def do_dropout(self, a, b, choice):
        return F.dropout(a, 0.3, self.training)

    def do_noise(self, a, b, choice):
        return a + torch.rand_like(a)

    def do_bernoulli_(self, a, b, choice):
        return a * torch.empty_like(a).bernoulli_(0.5)

    def do_item(self, a, b, choice):
        return a.sin() if a.mean().item() > 0 else (a * b).cos()

    def do_tolist(self, a, b, choice):
        return a * (1 if a.detach().exp().mean((0, 1)).tolist()[0] > 1 else 0.5)

    def do_nonzero(self, a, b, choice):
        flat = a.reshape(-1, WIDTH)
        chosen = (flat[:, 0] > 0).nonzero()[:, 0]
        return flat.clone().index_add_(0, chosen, flat[chosen].sin()).view_as(a)

    def do_own_function(self, a, b, choice):
        return OwnFunction.apply(a)

    def do_buffer(self, a, b, choice):
        self.seen.add_(a.detach().mean())
        return a

    def do_foreach(self, a, b, choice):
        with torch.no_grad():
            pair = [a * 1, b * 1]
            torch._foreach_mul_(pair, 0.5)
        return a * pair[0] + pair[1]
