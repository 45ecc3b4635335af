"""Initial weights: by name and seed alone, with the asked deviations, and the same part by part on any grid."""

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import dist, tiny
from megatron.lm.config.sections.precision import build_recipe
from megatron.lm.model.gpt import build_model
from megatron.lm.model.initial import named_globally
from msamp.numerics.tensor import fp32_values

SHAPE: dict[str, Any] = {"num_layers": 4, "num_attention_heads": 4, "make_vocab_size_divisible_by": 16, "init_method_std": 0.1}
LLAMA = {"swiglu": True, "group_query_attention": True, "num_query_groups": 2, "untie_embeddings_and_output_weights": True}
GRIDS: dict[str, dict[str, int]] = {
    "TP": {"tensor_model_parallel_size": 2},
    "PP": {"pipeline_model_parallel_size": 2},
    "interleaved": {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
}


def weights(**settings: Any) -> dict[str, tuple[Tensor, int | None]]:
    """This rank's weights in FP32 by the name on one process, with the dimension that is cut."""
    config = tiny.config("corpus", **{**SHAPE, **settings})
    found: dict[str, tuple[Tensor, int | None]] = {}
    with tiny.started(config):
        stages = config.parallel.virtual_stages(config.model.num_layers)
        for stage in [None] if stages is None else range(stages):
            model = build_model(*tiny.parts(config), build_recipe(config.precision), tiny.VOCABULARY, stage)
            for name, module in named_globally(model):
                for key, p in module.named_parameters(recurse=False):
                    cut = p.partition_dim if getattr(p, "tensor_model_parallel", False) else None
                    found[f"{name}.{key}"] = (fp32_values(p.detach()).cpu(), cut)
    return found


def parts(shape: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {name: weights(precision="fp32", **shape, **grid) for name, grid in GRIDS.items()}
    return found | {"rank": torch.distributed.get_rank()}


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes on one GPU")
def test_a_grid_starts_from_the_parts_of_one_process():
    for shape, ranks in zip((LLAMA, {}), dist.run(both_shapes, 2)[0]["all"], strict=True):
        whole = {name: x for name, (x, _) in weights(precision="fp32", **shape).items()}
        for grid in GRIDS:
            seen: set[str] = set()
            for rank in ranks:
                for name, (part, cut) in rank[grid].items():
                    expected = whole[name]
                    if cut is not None and grid == "TP":
                        strips = expected.chunk(2 if shape and "linear_fc1" in name else 1, cut)
                        expected = torch.cat([strip.chunk(2, cut)[rank["rank"]] for strip in strips], cut)
                    assert torch.equal(part, expected), (grid, name)
                    seen.add(name)
            assert seen == set(whole)


def both_shapes() -> dict[str, Any]:
    mine = [parts(LLAMA), parts({})]
    lists: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(lists, mine)
    return {"all": [[rank[i] for rank in lists] for i in range(2)]}


def test_deviations():
    found = weights(precision="fp32", hidden_size=128)
    std = {name: float(x.std()) for name, (x, _) in found.items() if x.dim() == 2}
    assert std["embedding.word_embeddings.weight"] == pytest.approx(0.1, rel=0.03)
    for layer in range(4):
        names = {name.split(".")[-2]: value for name, value in std.items() if f"layers.{layer}." in name}
        assert [names[key] for key in ("linear_qkv", "linear_fc1")] == pytest.approx([0.1] * 2, rel=0.03)
        assert [names[key] for key in ("linear_proj", "linear_fc2")] == pytest.approx(
            [0.1 / 8**0.5] * 2, rel=0.03
        )  # 1 / sqrt(2 x 4 layers)
    assert all(abs(float(x.mean())) < 0.005 for x, _ in found.values() if x.dim() == 2)
    assert not found["decoder.layers.0.mlp.linear_fc1.bias"][0].any()
    assert found["decoder.final_layernorm.weight"][0].eq(1).all()


def test_every_weight_has_numbers_of_its_own_and_the_seed_decides():
    found, again, other = (weights(precision="fp32", seed=seed) for seed in (1, 1, 2))
    matrices = [x for x, _ in found.values() if x.dim() == 2]
    assert len({tuple(x.flatten()[:4].tolist()) for x in matrices}) == len(matrices)
    assert all(torch.equal(x, again[name][0]) for name, (x, _) in found.items())
    assert all(not torch.equal(x, other[name][0]) for name, (x, _) in found.items() if x.dim() == 2)
