"""Models of transformers in a capture: attention masks of an eager step; on a GPU, halves of layers in BF16 where they do not gain."""

from pathlib import Path
from typing import Any

import pytest
import torch

import msamp
from helpers import hosts
from msamp.integrations.replay_checks import masks_as_in_eager_steps
from msamp.nn import layer_gains

transformers = hosts.need("transformers")
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "no window": ("llama", {}),
    "a window longer than the text": ("mistral", {"sliding_window": 64}),
    "a shorter window": ("mistral", {"sliding_window": 8}),
    "windows by layer": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
}


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("given", ["nothing", "a mask", "packed positions"])
def test_a_capture_has_the_masks_of_an_eager_step(kind: str, given: str, monkeypatch: pytest.MonkeyPatch):
    """transformers builds a mask in every capture, with which attention takes 2.5 times as long as by the causal flag (H200)."""
    family, more = FAMILIES[kind]
    config = transformers.AutoConfig.for_model(family, **SIZES, **more, vocab_size=96, attn_implementation="sdpa", use_cache=False)
    torch.manual_seed(0)
    model, ids = transformers.AutoModelForCausalLM.from_config(config).train(), torch.randint(0, 96, (2, 16))
    inputs = {"input_ids": ids, "labels": ids}
    if given == "a mask":
        inputs["attention_mask"] = torch.ones_like(ids).tril(8)
    if given == "packed positions":
        inputs["position_ids"] = torch.arange(8).repeat(2, 2)
    real, seen = torch.nn.functional.scaled_dot_product_attention, []

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append((kwargs.get("attn_mask") is None, kwargs.get("is_causal")))
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    eager, before = model(**inputs).loss, [seen.pop(0) for _ in range(2)]
    with monkeypatch.context() as capturing, masks_as_in_eager_steps(model):
        capturing.setattr(torch.cuda, "is_available", lambda: True)
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        captured = model(**inputs).loss
    assert captured.equal(eager)
    assert seen == before
    assert model.config._attn_implementation == "sdpa"
    assert (before[0] == (True, True)) == (given == "nothing" and "short" not in kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["no window", "windows by layer"])
@pytest.mark.parametrize("gain", [1e-6, 1e6], ids=["all gain", "none gains"])
def test_layers_are_timed_on_a_gpu(kind: str, gain: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    family, more = FAMILIES[kind]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(layer_gains, "default_measure", lambda: layer_gains.measure_stored)
    ids = torch.randint(0, 96, (3, 16), generator=torch.Generator().manual_seed(0)).cuda()
    losses = []
    for min_gain in (0, gain):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(family, **SIZES, **more, vocab_size=96)
        model = transformers.AutoModelForCausalLM.from_config(config).to("cuda", torch.bfloat16)
        model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "O2", fp8_min_gain=min_gain)

        def forward_backward(ids: torch.Tensor, model: torch.nn.Module = model) -> torch.Tensor:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            return loss

        step = msamp.capture(model, optimizer, forward_backward)
        losses.append([step(ids).item() for _ in range(8)])
        assert step.captured
        assert set(optimizer.in_bf16 or ()) == (set(optimizer.scaling.linears) if min_gain == 1e6 else set())
        step.release()
    assert losses[1] == pytest.approx(losses[0], rel=1e-4 if gain < 1 else 2e-2)
