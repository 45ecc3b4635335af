"""Attention masks of transformers in a capture: the ones of an eager step."""

from typing import Any

import pytest
import torch

from helpers import hosts
from msamp.integrations.replay_checks import masks_as_in_eager_steps

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
