import csv
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from helpers.definitions import grouped_mm
from tools.bench import rows
from tools.bench.baselines import bench_moe_baselines as bench

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 8}
WORK = bench.Work(micro_batch=2, micro_batches=2, seq_length=16)
CPU = torch.device("cpu")


def config(**shape: Any) -> Any:
    return bench.olmoe(2, num_experts_per_tok=2, **SHAPE | shape)


def step_data(work: bench.Work = WORK) -> list[torch.Tensor]:
    return list(itertools.islice(bench.token_rows(None, 64, work, CPU), work.micro_batches))


@pytest.fixture
def no_torchao(monkeypatch):
    """torchao's product and its linear layers, which require the package and a GPU, by plain torch's."""
    monkeypatch.setattr(bench, "torchao_fp8", lambda: grouped_mm)
    monkeypatch.setattr(bench, "convert_linears", lambda layers: None)


@pytest.mark.parametrize("case", bench.CASES)
def test_a_row(case, no_torchao):
    row = bench.measure(case, config(), WORK, 2, None, CPU)
    with (rows.ROOT / "tools/bench/results/moe.csv").open(newline="") as stream:
        assert list(rows.machine("abc") | row) == next(csv.reader(stream))
    assert row["case"] == bench.CASES[case] + ", random tokens"
    assert row["tokens_s"] > 0
    assert row["first_loss"] == pytest.approx(np.log(64), rel=0.02)


def test_experts_on_padded_groups_are_transformers(no_torchao, monkeypatch):
    """The experts of the case `torchao`, with torch's product in the place of torchao's, are those of `grouped_mm`."""
    ends = []
    monkeypatch.setattr(bench, "torchao_fp8", lambda: lambda a, b, offsets: (ends.extend(offsets.tolist()), grouped_mm(a, b, offsets))[1])
    losses = [bench.BaselineTrainer(case, config(), CPU).forward(step_data()[0]).item() for case in ("bf16-master", "torchao")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert {end % 16 for end in ends} == {0}, "torchao requires it"


def test_weights_follow_fp32_masters():
    """The masters are those of AdamW on the FP32 sum of the micro-batches' BF16 gradients, and the model has their roundings."""
    trainer, plain_model = (bench.BaselineTrainer(case, config(), CPU, lr=1e-2) for case in ("bf16-master", "bf16"))
    names = [name for name, _ in trainer.model.named_parameters()]
    want = {name: torch.nn.Parameter(p.detach().float()) for name, p in plain_model.model.named_parameters()}
    for tokens in step_data():
        (plain_model.forward(tokens) / WORK.micro_batches).backward()
        for name, p in plain_model.model.named_parameters():
            assert p.grad is not None
            before = want[name].grad
            want[name].grad = p.grad.float() if before is None else before + p.grad
            p.grad = None
    torch.nn.utils.clip_grad_norm_(want.values(), 1.0)
    torch.optim.AdamW(want.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1).step()
    trainer.step(step_data())
    for name, master, weight in zip(names, trainer.updated, trainer.model.parameters(), strict=True):
        torch.testing.assert_close(master, want[name], rtol=1e-6, atol=1e-7)
        assert torch.equal(weight, master.to(torch.bfloat16))
        assert weight.grad is None
        assert master.grad is not None
        assert not master.grad.any()


def test_tokens_of_a_dataset(tmp_path):
    """Consecutive, over the ends of documents and of the dataset."""
    builder = IndexedDatasetBuilder(str(tmp_path / "text.bin"), dtype=np.int32)
    for document in (range(20), range(20, 50)):
        builder.add_document(np.array(document), [len(document)])
    builder.finalize(str(tmp_path / "text.idx"))
    batches = bench.token_rows(str(tmp_path / "text"), 64, WORK, CPU)
    got = torch.cat([next(batches).flatten() for _ in range(3)])
    assert got.tolist() == [i % 50 for i in range(3 * 34)]
    with pytest.raises(ValueError, match="token 49"):
        list(itertools.islice(bench.token_rows(str(tmp_path / "text"), 40, WORK, CPU), 2))


@pytest.mark.gpu
def test_compiled_on_a_gpu():
    row = bench.measure("bf16-master", config(), WORK, 2, None, torch.device("cuda"))
    assert row["peak_gib"] > 0
