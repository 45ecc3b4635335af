"""Every layout is undone by its inverse."""

import pytest
import torch

from helpers.hf_models import config
from megatron.lm.tools.convert.layouts import HALVES, QKV, SAME, STACKED_QKV, TRANSPOSED


def test_query_key_and_value_come_out_of_their_groups():
    model = config("llama").model  # 4 query heads and 2 groups of width 8
    rows = torch.arange(2 * (2 + 2) * 8)
    q, k, v = QKV.split(model, rows)
    first, second = rows.chunk(2)
    assert torch.equal(q, torch.cat([first[:16], second[:16]]))
    assert torch.equal(k, torch.cat([first[16:24], second[16:24]]))
    assert torch.equal(v, torch.cat([first[24:], second[24:]]))


@pytest.mark.parametrize("layout", [SAME, TRANSPOSED, HALVES, QKV, STACKED_QKV])
@pytest.mark.parametrize("shape", [(96, 32), (96,)])
def test_join_undoes_split(layout, shape):
    model = config("gpt2").model  # 2 heads of width 16: 96 rows
    x = torch.randn(shape)
    assert torch.equal(layout.join(model, layout.split(model, x)), x)
