"""Packed documents never see each other: values, losses and gradients against each document alone, on real families."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from ckpt.attention import NAME, NAME_EAGER, bounds, isolation_error, prepare
from recipes.data import IGNORE, build_data, model_inputs

LENGTHS = [7, 20, 1, 16]
ISOLATING = [
    "llama",
    "qwen3",
    "phi3",
    "mistral",
    "mixtral",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gpt2",
    "gpt_oss",
    "opt",
    "olmo2",
    "cohere2",
    "deepseek_v3",
    "afmoe",
    "longcat_flash",
    "diffllama",
    "bert",
    "ctrl",
]


def documents(seed=0, lengths=LENGTHS):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 60, (1, n), generator=gen) for n in lengths]


def pack(parts, **kw):
    """One row of documents as a batch of model inputs."""
    lengths = [p.shape[1] for p in parts]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    labels = [torch.cat([torch.full((1, 1), IGNORE), p[:, 1:]], 1) for p in parts]
    return {
        "input_ids": torch.cat(parts, 1),
        "labels": torch.cat(labels, 1),
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seq_lens_q": bounds.from_starts(starts, 1, sum(lengths)),
        "use_cache": False,
        **kw,
    }


def scored(labels):
    return int((labels[:, 1:] != IGNORE).sum())


# ---------------------------------------------------------------- each document alone


@pytest.mark.parametrize("mask", [None, "ones"])
@pytest.mark.parametrize("name", ISOLATING)
def test_packed_documents_equal_each_alone(name, mask):
    """Logits within 1e-5, the loss within 1e-6, gradients within 1e-5 of their norm: as the model's own attention."""
    model, parts = zoo.build(name), documents()
    model.config.output_router_logits = False
    alone, total = [], 0.0
    for part in parts:
        out = model(input_ids=part, use_cache=False)
        alone.append(out.logits.detach())
        if part.shape[1] > 1:
            total = total + F.cross_entropy(out.logits[0, :-1].float(), part[0, 1:], reduction="sum")
    batch = pack(parts)
    total = total / scored(batch["labels"])
    total.backward()
    wanted = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    prepared = prepare(model, "isolate")
    assert "flash" not in prepared.implementation
    if mask:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    out = model(**batch)
    out.loss.backward()
    size = max(1.0, float(torch.cat(alone, 1).abs().max()))
    assert float((out.logits.detach() - torch.cat(alone, 1)).abs().max()) / size < 1e-5
    assert abs(out.loss.item() - total.item()) < 1e-6 * max(1.0, total.item())
    assert wanted.keys() == {key for key, p in model.named_parameters() if p.grad is not None}
    for key, p in model.named_parameters():
        if key in wanted:
            assert (p.grad - wanted[key]).norm() <= 1e-5 * wanted[key].norm() + 1e-6, key
    assert prepared.num_layers >= model.config.num_hidden_layers


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text"])
def test_nothing_in_one_document_changes_another(name):
    """Bitwise: other text before and after, at the same places, changes nothing in the second document."""
    model = zoo.build(name)
    prepare(model)
    parts = documents()
    with torch.no_grad():
        first = model(**pack(parts)).logits[:, 7:27]
        parts[0], parts[3] = documents(1)[0], documents(1)[3]
        assert torch.equal(model(**pack(parts)).logits[:, 7:27], first)
        parts[1] = documents(2)[1]
        assert not torch.equal(model(**pack(parts)).logits[:, 7:27], first)


def test_without_preparation_documents_leak():
    """The fault that all this is against: a mask of ones, or the default cache, and the stock model mixes documents."""
    model, parts = zoo.build("llama").eval(), documents()
    with torch.no_grad():
        alone = model(input_ids=parts[1], use_cache=False).logits
        batch = pack(parts)
        batch.pop("cu_seq_lens_q")
        ones = torch.ones_like(batch["input_ids"])
        assert (model(**batch, attention_mask=ones).logits[:, 7:27] - alone).abs().max() > 0.01
        prepare(model)
        assert (model(**batch, attention_mask=ones).logits[:, 7:27] - alone).abs().max() < 1e-5
        assert (model(**{**batch, "use_cache": True}).logits[:, 7:27] - alone).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss"])
def test_the_isolation_error_tells_isolating_models_from_others(name):
    model = zoo.build(name)
    model.model.layers[0].eval()
    modes = [m.training for m in model.modules()]
    prepared = prepare(model)
    assert isolation_error(model) < 1e-5
    assert modes == [m.training for m in model.modules()]
    prepared.undo()
    prepare(model, "concat", prepared.implementation)
    layer = model.model.layers[1].self_attn
    forward = type(layer).forward
    layer.forward = lambda *a, cu_seq_lens_q=None, **kw: forward(layer, *a, **kw)
    assert isolation_error(model) > 1e-3


def test_restarting_positions_alone_are_enough():
    model, batch = zoo.build("llama"), pack(documents())
    prepare(model)
    wanted = model(**batch).logits
    batch.pop("cu_seq_lens_q")
    assert torch.equal(model(**batch).logits, wanted)


def test_rows_of_a_batch_have_boundaries_of_their_own():
    model, rows = zoo.build("llama"), [documents(0, [9, 15]), documents(1, [20, 4])]
    alone = torch.cat([torch.cat([model(input_ids=p, use_cache=False).logits for p in row], 1) for row in rows])
    prepare(model)
    ids = torch.cat([torch.cat(row, 1) for row in rows])
    positions = torch.stack([torch.cat([torch.arange(p.shape[1]) for p in row]) for row in rows])
    out = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert (out - alone).abs().max() < 1e-5


def test_rows_without_boundaries_are_plain_causal_rows():
    model, ids = zoo.build("mistral"), torch.randint(3, 60, (2, 48))
    wanted = model(ids, use_cache=False).logits
    prepare(model)
    assert (model(ids, use_cache=False).logits - wanted).abs().max() < 1e-5


def test_batches_of_the_data_pipeline_isolate(tmp_path):
    """From files to loss: the loss of a packed batch is the mean over all labelled tokens of documents run alone."""
    for i in range(30):
        (tmp_path / f"{i}.txt").write_text(chr(97 + i % 26) * (5 + 7 * i))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    stock, model = LlamaForCausalLM(config), LlamaForCausalLM(config)
    model.load_state_dict(stock.state_dict())
    data = build_data("text", path=str(tmp_path), tokenizer=ByT5Tokenizer(), seq_len=128, batch_size=2)
    prepare(model)
    for _ in range(4):
        batch = next(data.train)
        ids, edges, total = batch["input_ids"].flatten(), batch["cu_seq_lens_q"].unique().tolist(), 0.0
        with torch.no_grad():
            for a, b in zip(edges, edges[1:], strict=False):
                logits = stock(ids[None, a:b], use_cache=False).logits
                total += float(F.cross_entropy(logits[0, :-1], ids[a + 1 : b], reduction="sum")) if b - a > 1 else 0.0
            loss = model(**model_inputs(batch), use_cache=False).loss
        assert float(loss) == pytest.approx(total / batch["num_labels"], abs=1e-6)


# ---------------------------------------------------------------- no mask, whatever the length


class Largest(TorchDispatchMode):
    """The most elements that any op put out, and the names of all ops."""

    def __init__(self):
        super().__init__()
        self.elements, self.names = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.append(func.name())
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_no_tensor_of_rows_by_rows_is_ever_built(name, monkeypatch):
    def forbidden(*_args, **_kw):
        raise AssertionError("stock SDPA was called")

    monkeypatch.setattr(F, "scaled_dot_product_attention", forbidden)
    model = zoo.build(name)
    model.config.max_position_embeddings = 1024
    prepare(model)
    batch = pack(documents(0, [400, 500, 100]))
    with Largest() as ops:
        model(**batch).loss.backward()
    assert ops.elements < 1000 * 1000 * 0.6  # logits and experts' outputs; a mask would be 1000 * 1000
    assert ops.names.count("ckpt::packed_attention") == model.config.num_hidden_layers


def test_a_step_runs_the_same_ops_whatever_the_documents():
    model = zoo.build("qwen3")
    prepare(model)
    names = []
    for lengths in ([48], [7, 20, 5, 16], [2] * 24):
        batch = pack(documents(0, lengths))
        with Largest() as ops:
            model(**batch).loss.backward()
        model.zero_grad()
        names.append(ops.names)
    assert names[1] == names[2]
    layers = [[x for x in ops if x.startswith("ckpt::")] for ops in names]
    assert layers[0] == layers[1] and len(layers[0]) == 8


@pytest.mark.parametrize("given", ["boundaries", "positions"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gemma2"])
def test_a_fake_run_sees_the_ops_of_a_real_one(name, given):
    """Layer by layer: prediction stands on it. Beyond them, real position_ids are read by Transformers."""

    def run(fake):
        model, batch = zoo.build(name), pack(documents())
        if given == "positions":
            batch.pop("cu_seq_lens_q")
        prepare(model)
        mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()
        if fake:
            batch = {key: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for key, x in batch.items()}
        spans = []

        def enter(*_):
            spans.append([len(ops.names)])

        def leave(*_):
            spans[-1].append(len(ops.names))

        for layer in model.get_decoder().layers:
            layer.register_forward_pre_hook(enter)
            layer.register_forward_hook(leave)
        with mode, Largest() as ops:
            out = model(**batch)
        layers = [[op for op in ops.names[a:b] if not op.startswith("prim::")] for a, b in spans]
        return layers, out.logits.shape, ops.elements

    assert run(fake=True) == run(fake=False)


# ---------------------------------------------------------------- with other things in force


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_attention_runs_in_its_dtype(dtype, monkeypatch):
    from ckpt.attention import interface

    seen = []
    original = interface.packed_attention
    monkeypatch.setattr(
        interface,
        "packed_attention",
        lambda q, k, v, *a: seen.append({q.dtype, k.dtype, v.dtype}) or original(q, k, v, *a),
    )
    model = zoo.build("qwen3")
    prepare(model)
    with torch.autocast("cpu", dtype):
        model(**pack(documents())).loss.backward()
    assert seen == [{dtype}] * 4


def test_recomputed_layers_give_the_same_gradients():
    model, batch = zoo.build("llama"), pack(documents())
    prepare(model)
    model(**batch).loss.backward()
    wanted = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()
    model.activation_checkpointing_enable()
    model(**batch).loss.backward()
    assert all(torch.equal(p.grad, wanted[key]) for key, p in model.named_parameters())


def test_compiled_layers_are_proved_and_isolate():
    model, parts = zoo.build("llama"), documents()
    alone = model(input_ids=parts[1], use_cache=False).logits
    prepared = prepare(model)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):  # the first forward is the proof, in eager mode
        assert (model(**pack(parts)).logits[:, 7:27] - alone).abs().max() < 1e-5
    assert prepared.num_layers == 4


def test_it_works_beneath_lora():
    from peft import LoraConfig, get_peft_model

    model, parts = get_peft_model(zoo.build("llama"), LoraConfig(target_modules=["q_proj", "v_proj"], r=4)), documents()
    alone = model(input_ids=parts[1], use_cache=False).logits
    prepared = prepare(model)
    out = model(**pack(parts))
    assert (out.logits[:, 7:27] - alone).abs().max() < 1e-5 and prepared.num_layers == 4
    prepared.undo()
    assert model.config._attn_implementation == "sdpa"


def test_a_deep_copy_isolates_too():
    model, parts = zoo.build("llama"), documents()
    alone = model(input_ids=parts[1], use_cache=False).logits
    prepare(model)
    copied = copy.deepcopy(model)
    assert (copied(**pack(parts)).logits[:, 7:27] - alone).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_generation_is_as_before(name):
    """Cached decoding, left padding and all, goes to the model's own attention."""
    model = zoo.build(name).eval()
    ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    kw = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    wanted, plain = model.generate(ids, **kw), model.generate(ids[:1], **{**kw, "attention_mask": mask[:1]})
    prepared = prepare(model)
    assert torch.equal(model.generate(ids, **kw), wanted)
    assert torch.equal(model.generate(ids[:1], **{**kw, "attention_mask": mask[:1]}), plain)
    prepared.undo()


# ---------------------------------------------------------------- undo and sharing


def test_undo_restores_configs_and_hooks():
    model = zoo.build("gemma3")
    before = {name: module.config for name, module in model.named_modules() if hasattr(module, "config")}
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    prepared = prepare(model)
    assert model.get_decoder().config._attn_implementation == NAME
    prepared.undo()
    prepared.undo()
    assert all(model.get_submodule(name).config is config for name, config in before.items())
    assert hooks == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    assert not {c._attn_implementation for c in before.values()} & {NAME, NAME_EAGER}


def test_models_that_share_a_config_are_told_apart():
    config = zoo.config("llama")
    first, second = LlamaForCausalLM(config), LlamaForCausalLM(config)
    prepared = prepare(first)
    assert second.config is config and config._attn_implementation == "sdpa"
    assert first.config._attn_implementation == first.model.layers[0].self_attn.config._attn_implementation == NAME
    prepared.undo()
    assert first.config is config and first.model.layers[0].self_attn.config is config


def test_what_is_saved_does_not_know_of_it(tmp_path):
    model = zoo.build("llama")
    model.save_pretrained(tmp_path / "before")
    prepare(model)
    model(**pack(documents()))
    model.save_pretrained(tmp_path / "after")
    assert (tmp_path / "before" / "config.json").read_text() == (tmp_path / "after" / "config.json").read_text()
    assert LlamaForCausalLM.from_pretrained(tmp_path / "after").config._attn_implementation == "sdpa"


@pytest.mark.parametrize("packing", ["concat", "none"])
def test_other_packings_take_the_implementation_and_no_guard(packing):
    model = zoo.build("llama")
    prepared = prepare(model, packing, "eager")
    assert model.config._attn_implementation == "eager" and not model._forward_pre_hooks
    prepared.undo()
    assert model.config._attn_implementation == "sdpa"


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("qwen3_next", "linear_attention layers"),
        ("bamba", "linear_attention layers"),
        ("jamba", "linear_attention layers"),
        ("mamba", "linear_attention layers"),
        ("mamba2", "linear_attention layers"),
        ("falcon_mamba", "linear_attention layers"),
        ("falcon_h1", "hybrid layers"),
        ("granitemoehybrid", "linear_attention layers"),
        ("nemotron_h", "linear_attention"),
        ("recurrent_gemma", "linear_attention layers"),
        ("zamba", "linear_attention layers"),
        ("zamba2", "linear_attention layers"),
        ("lfm2", "conv layers"),
        ("minimax", "linear_attention layers"),
        ("kimi_linear", "linear_attention layers"),
        ("rwkv", "RwkvBlock carries state"),
        ("xlstm", "carries state"),
        ("llama4_text", "chunked_attention layers"),
        ("deepseek_v32", "indexed_attention layers"),
        ("bart", "counts positions itself"),
        ("roberta", "counts positions itself"),
        ("whisper", "counts positions itself"),
        ("falcon", "no AttentionInterface"),
        ("bloom", "no AttentionInterface"),
        ("reformer", "LSH"),
        ("stablelm", "do not hand keywords on"),
        ("nemotron", "do not hand keywords on"),
        ("doge", "learned bias"),
        ("mllama", "cross-attention layers"),
    ],
)
def test_families_that_cannot_isolate_are_refused_by_name(name, why):
    model = zoo.build(name)
    before = model.config
    with pytest.raises(
        ValueError,
        match=f"{type(model).__name__} .{model.config.get_text_config().model_type}.*{why}.*data.packing=none",
    ):
        prepare(model, "isolate")
    assert model.config is before and not model._forward_pre_hooks


def test_a_model_that_drops_the_boundaries_is_refused_at_its_first_forward():
    model = zoo.build("llama")
    layer = model.model.layers[2].self_attn
    original = type(layer).forward
    layer.forward = lambda *a, cu_seq_lens_q=None, **kw: original(layer, *a, **kw)
    prepare(model)
    with pytest.raises(
        ValueError, match="in 4 modules, 1 of them without document boundaries.*does not hand cu_seq_lens_q on"
    ):
        model(**pack(documents()))


def test_a_layer_that_does_not_call_the_attention_is_refused_at_the_first_forward():
    model = zoo.build("llama")
    layer = model.model.layers[1].self_attn
    layer.forward = lambda hidden_states, **kw: (layer.o_proj(layer.q_proj(hidden_states)), None)
    prepare(model)
    with pytest.raises(ValueError, match="1 of its 4 decoder layers did not call it"):
        model(**pack(documents()))


def test_a_window_that_is_not_passed_on_is_refused_at_the_first_forward():
    model = zoo.build("gemma3_text")
    slides = [m for m in model.modules() if getattr(m, "sliding_window", None) and hasattr(m, "layer_idx")]
    slides[0].sliding_window = None
    prepare(model)
    with pytest.raises(ValueError, match="attends in a window of 8 tokens, but asked its attention function for none"):
        model(**pack(documents()))


def test_the_proof_is_made_again_after_a_forward_that_failed():
    model = zoo.build("llama")
    prepared = prepare(model)
    with pytest.raises(ValueError, match="exactly one of input_ids"):
        model(**pack(documents()), inputs_embeds="nonsense")
    assert prepared.num_layers == 0
    model(**pack(documents()))
    assert prepared.num_layers == 4


def test_attention_dropout_is_refused_with_the_field_to_change():
    with pytest.raises(ValueError, match="attention_dropout=0.1.*Set model.config.attention_dropout=0.0"):
        prepare(zoo.build("llama", dropout=0.1))
    model = zoo.build("llama")
    prepare(model)
    model.model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match="asks for attention dropout 0.1"):
        model(**pack(documents()))


@pytest.mark.parametrize("packed", [True, False])
def test_padded_masks_are_refused_in_training(packed):
    model, batch = zoo.build("llama"), pack(documents())
    prepare(model)
    mask = torch.ones_like(batch["input_ids"])
    mask[:, -4:] = 0
    batch = {**batch, "attention_mask": mask} if packed else {"input_ids": batch["input_ids"], "attention_mask": mask}
    with pytest.raises(ValueError, match=r"attention_mask of shape \(1, 44\) that hides tokens.*Pad on the right"):
        model(**batch)


def test_padded_rows_outside_of_training_are_as_before():
    model = zoo.build("llama").eval()
    ids = torch.randint(3, 60, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask, use_cache=False).logits
        prepare(model)
        assert torch.equal(model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()], wanted[mask.bool()])


def test_another_implementation_cannot_isolate():
    with pytest.raises(ValueError, match="packing=isolate runs on ckpt_packed, got attention implementation 'sdpa'"):
        prepare(zoo.build("llama"), "isolate", "sdpa")


# ---------------------------------------------------------------- every architecture


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.names())
def test_every_architecture_isolates_or_is_refused(name):
    """In float64, so that rounding hides nothing: packed equals alone, or prepare or the first forward says why not."""
    model, parts = zoo.build(name).double().eval(), documents()
    for module in model.modules():
        module._buffers.update(
            {k: b.double() for k, b in module._buffers.items() if b is not None and b.is_floating_point()}
        )
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # grouped matmuls have no float64
    try:
        prepared = prepare(model)
    except ValueError as error:
        assert "packing=isolate cannot keep documents apart" in str(error)
        return
    prepared.undo()
    with torch.no_grad():
        alone = torch.cat([model(input_ids=p, use_cache=False).logits for p in parts], 1)
        prepare(model)
        try:
            out = model(**pack(parts)).logits
        except ValueError as error:
            assert "packing=isolate" in str(error)
            return
    assert (out - alone).abs().max() < 1e-5 * max(1.0, float(alone.abs().max()))
