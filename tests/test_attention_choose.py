"""Which attention is chosen for what, what is refused instead of falling back, and the line about a dense mask."""

import importlib.util

import pytest
import torch
import zoo
from transformers import AttentionInterface, AttentionMaskInterface

from ckpt.attention import NAME, NAME_EAGER, choose, prepare, refusal, watch_masks
from ckpt.attention.choose import REQUESTS

FA2, FA3 = "flash_attn", "flash_attn_interface"


@pytest.fixture
def gpu(monkeypatch):
    """A device of some compute capability with some packages installed, as far as the choice asks."""

    def make(capability, *packages):
        find = importlib.util.find_spec
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (capability, 0))
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *a: object() if name in packages else None if name in (FA2, FA3) else find(name, *a),
        )

    return make


def on_gpu(name="llama", requested="auto", dtype=torch.bfloat16, **kw):
    return choose(zoo.config(name), requested, device="cuda", dtype=dtype, **kw)


def test_the_names_are_registered_with_their_masks_and_without_flash():
    for name in (NAME, NAME_EAGER):
        assert name in AttentionInterface._global_mapping and name in AttentionMaskInterface._global_mapping
        assert "flash" not in name


@pytest.mark.parametrize(
    ("capability", "packages", "implementation", "kernel", "why"),
    [
        (9, (FA2, FA3), "flash_attention_3", "FlashAttention-3", ""),
        (9, (FA2,), "flash_attention_2", "FlashAttention-2", "flash_attn_interface is not installed"),
        (8, (FA2, FA3), "flash_attention_2", "FlashAttention-2", "FlashAttention-3 needs compute capability 9.0"),
        (8, (), "sdpa", "SDPA, torch's FlashAttention-2", "flash_attn is not installed"),
        (7, (FA2, FA3), "sdpa", "SDPA", "FlashAttention-2 needs compute capability 8.0"),
    ],
)
def test_auto_takes_flash_3_then_2_then_sdpa_and_says_why(gpu, capability, packages, implementation, kernel, why):
    gpu(capability, *packages)
    choice = on_gpu(packing="concat")
    assert choice.implementation == implementation and choice.kernel.startswith(kernel) and why in choice.why
    assert str(choice).startswith(f"{implementation}: {kernel}")


@pytest.mark.parametrize(
    ("capability", "packages", "kernel", "torch_flash"),
    [
        (9, (FA3,), "FlashAttention-3", "FA3"),
        (9, (), "torch's FlashAttention-2", None),
        (8, (FA3,), "torch's FlashAttention-2", None),
    ],
)
def test_isolated_documents_run_the_best_variable_length_flash(gpu, capability, packages, kernel, torch_flash):
    gpu(capability, *packages)
    choice = on_gpu()
    assert choice.implementation == NAME and choice.kernel.startswith(kernel) and choice.torch_flash == torch_flash
    assert on_gpu("gpt_oss").implementation == NAME_EAGER


def test_on_a_cpu_flash_runs_document_by_document():
    choice = choose(zoo.config("llama"))
    assert choice.implementation == NAME and choice.is_flash and "CPU" in choice.kernel and choice.why
    assert choose(zoo.config("llama"), "flash") == choice


def test_flash_refuses_to_fall_back(gpu):
    gpu(9)
    with pytest.raises(
        ValueError,
        match="attn=flash cannot run: blocks of plain math would. FlashAttention-3 needs bf16 or fp16, got float32",
    ):
        on_gpu(requested="flash", dtype=torch.float32)
    with pytest.raises(ValueError, match="attn=flash cannot run: SDPA, memory-efficient"):
        on_gpu(requested="flash", dtype=torch.float32, packing="none")
    with pytest.raises(ValueError, match="attn=flash cannot run.*caps scores"):
        choose(zoo.config("gemma2"), "flash")


@pytest.mark.parametrize("packing", ["isolate", "concat"])
def test_a_flash_that_is_asked_for_by_number_runs_or_is_refused(gpu, packing):
    gpu(8, FA2)
    assert on_gpu(requested="flash_attention_2", packing=packing).kernel.endswith(
        ("FlashAttention-2", "variable lengths")
    )
    with pytest.raises(
        ValueError, match="attn=flash_attention_3 cannot run: FlashAttention-3 needs compute capability 9.0"
    ):
        on_gpu(requested="flash_attention_3", packing=packing)
    with pytest.raises(ValueError, match="FlashAttention-2 needs a CUDA device"):
        choose(zoo.config("llama"), "flash_attention_2", packing=packing)


def test_a_package_that_is_missing_is_never_fetched(gpu):
    """Transformers would download a kernel for this name; the choice refuses it instead."""
    gpu(9)
    with pytest.raises(ValueError, match="flash_attn is not installed"):
        on_gpu(requested="flash_attention_2", packing="none")
    assert on_gpu(packing="none").implementation == "sdpa"


def test_hub_kernels_run_only_when_named():
    choice = choose(zoo.config("llama"), "kernels:someone/some-kernel", packing="none")
    assert choice.implementation == "someone/some-kernel"
    with pytest.raises(ValueError, match="packed documents run on ckpt_packed"):
        choose(zoo.config("llama"), "kernels:someone/some-kernel")
    with pytest.raises(ValueError, match="Write attn=kernels:OWNER/NAME"):
        choose(zoo.config("llama"), "kernels:", packing="none")


def test_unknown_and_impossible_requests_are_named():
    with pytest.raises(ValueError, match="attn='fast' is unknown. Use one of auto, flash"):
        choose(zoo.config("llama"), "fast")
    with pytest.raises(ValueError, match="attn=eager with data.packing=isolate would build an S x S mask"):
        choose(zoo.config("llama"), "eager")
    with pytest.raises(ValueError, match="attn=sdpa is not supported by Gemma2ForCausalLM"):
        choose(zoo.config("gemma2"), "sdpa", packing="none")


def test_isolation_that_a_family_cannot_do_is_refused_when_choosing():
    for model in (zoo.config("qwen3_next"), zoo.build("rwkv"), zoo.config("falcon")):
        with pytest.raises(ValueError, match="packing=isolate cannot keep documents apart"):
            choose(model)
        assert choose(model, packing="none").implementation in ("sdpa", "eager")


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "gpt_oss", "gemma2"])
def test_a_window_or_a_missing_sdpa_takes_packed_attention_instead_of_a_dense_mask(name):
    choice = choose(zoo.config(name), packing="none", seq_len=48)
    assert choice.implementation in (NAME, NAME_EAGER)
    model = zoo.build(name)
    ids = torch.randint(3, 60, (2, 48))
    wanted, said = model(ids, use_cache=False).logits, []
    prepare(model, "none", choice.implementation)
    watch_masks(model, say=said.append)
    assert (model(ids, use_cache=False).logits - wanted).abs().max() < 1e-5 * max(1, wanted.abs().max()) and not said


def test_a_window_longer_than_the_row_stays_with_sdpa():
    assert choose(zoo.config("mistral"), packing="none", seq_len=8).implementation == "sdpa"


def test_every_request_has_an_answer_or_an_error_for_every_kind_of_family():
    """No other exception than ValueError, and nothing chosen that the family refuses."""
    for name in zoo.REPRESENTATIVE:
        config = zoo.config(name)
        for packing in ("isolate", "concat"):
            for requested in REQUESTS:
                try:
                    choice = choose(config, requested, packing=packing, seq_len=64)
                except ValueError:
                    continue
                assert choice.implementation not in (NAME, NAME_EAGER) or refusal(config) is None


# ---------------------------------------------------------------- dense masks


def masked(ids):
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"attention_mask": mask}


@pytest.mark.parametrize("kind", ["padded", "packed", "window"])
def test_a_dense_mask_is_reported_once_in_one_line(kind):
    model = zoo.build("mistral" if kind == "window" else "llama")
    ids, said = torch.randint(3, 60, (1, 32)), []
    extra = {"padded": masked(ids), "packed": {"position_ids": torch.arange(32)[None] % 16}, "window": {}}[kind]
    watch_masks(model, say=said.append)
    model(ids, use_cache=False, **extra)
    model(ids, use_cache=False, **extra)
    assert len(said) == 1 and "dense attention mask (1, 1, 32, 32)" in said[0] and "\n" not in said[0]
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("mask", [None, "ones"])
def test_rows_that_keep_flash_are_not_reported(mask):
    model, ids, said = zoo.build("llama"), torch.randint(3, 60, (2, 32)), []
    undo = watch_masks(model, say=said.append)
    model(ids, use_cache=False, attention_mask=torch.ones_like(ids) if mask else None)
    assert not said
    undo()
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_forced_flash_refuses_a_dense_mask():
    model, ids = zoo.build("llama"), torch.randint(3, 60, (1, 32))
    watch_masks(model, forbid=True)
    with pytest.raises(ValueError, match="attn=flash: a dense attention mask"):
        model(ids, use_cache=False, **masked(ids))
