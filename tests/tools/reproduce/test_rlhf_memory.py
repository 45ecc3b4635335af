"""PPO's bytes counted from shapes are those of models that were trained for a step, and reach the paper's figures or do not."""

import pytest
import torch
from torch import nn

import msamp
from megatron.lm.post.memory import Stored, stored
from megatron.lm.post.models import freeze
from msamp.numerics import recipe as recipes
from tools.reproduce import rlhf_memory
from tools.reproduce.rlhf_memory import LLAMA_7B, Shape

SMALL = Shape(layers=2, hidden=64, ffn=160, vocabulary=128)


class Llama(nn.Module):
    """The parameters of a LLaMA, in a sum that uses all of them."""

    def __init__(self, shape: Shape, outputs: int) -> None:
        super().__init__()
        h = shape.hidden
        widths = [(h, h)] * 4 + [(h, shape.ffn)] * 2 + [(shape.ffn, h)]
        self.embedding = nn.Embedding(shape.vocabulary, h)
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(*width, bias=False) for width in widths) for _ in range(shape.layers))
        self.norms = nn.ModuleList(nn.RMSNorm(h) for _ in range(2 * shape.layers + 1))
        self.lm_head = nn.Linear(h, outputs, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for norm in self.norms:
            x = norm(x)
        for *four, gate, up, down in self.layers:
            for layer in four:
                x = x + layer(x)
            x = x + down(gate(x) * up(x))
        return self.lm_head(x)


def held(shape: Shape, recipe: recipes.Recipe) -> Stored:
    """What the four models of PPO hold after a backward of their second step."""
    found, tokens = Stored(), torch.arange(16).view(2, 8)
    for outputs in (shape.vocabulary, 1):
        model, reference = (Llama(shape, outputs).bfloat16() for _ in range(2))
        model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters()), recipe)
        for _ in range(2):
            optimizer.zero_grad()
            model(tokens).float().square().mean().backward()
            each = stored(model, optimizer)
            optimizer.step()
        found += each + stored(freeze(reference, recipe))
    return found


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_counts_are_what_trained_models_hold(level):
    recipe = recipes.by_name(level)
    count, real = rlhf_memory.ppo(SMALL, recipe), held(SMALL, recipe)
    assert count.parameters == real.parameters
    for kind in ("weights", "gradients", "masters", "moments"):
        assert getattr(real, kind) == pytest.approx(getattr(count, kind), rel=3e-3, abs=64), kind


def test_llama_7b_has_its_parameters():
    assert sum(LLAMA_7B.elements(LLAMA_7B.vocabulary).values()) == 6_738_415_616


@pytest.mark.promise(
    "Recipes", "PPO's states and gradients of LLaMA-7B fall by 62 % at O3 from states with FP32 gradients, as in FP8-LM's Table 4."
)
def test_llama_7b_reaches_the_paper_s_figure_from_fp32_gradients_alone():
    found = {each.quantity: each.ours for each in rlhf_memory.counted()}
    o3 = "O3, LLaMA-7B counted: states and gradients from O0's with"
    assert found[f"{o3} FP32 gradients"] == pytest.approx(-62, abs=0.5)
    assert found[f"{o3} BF16 gradients"] == pytest.approx(-57, abs=0.5)
    assert found["O2, LLaMA-7B counted: states and gradients from O0's with BF16 gradients"] < -70
    o2, o3 = (found[f"{level}, LLaMA-7B counted: weights of all models from O0's"] for level in ("O2", "O3"))
    assert o3 < -32 < o2
