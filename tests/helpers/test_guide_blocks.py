"""The programs of docs/guide/own_loop.md run as printed.

Its fragments do in tests/integrations/test_guide.py and tests/msamp/integrations/test_fsdp.py.
"""

import pytest
import torch

from helpers import guide_blocks

PAGE = "own_loop.md"
WHOLE = [block for block in guide_blocks.blocks(PAGE) if not block.takes]


def test_every_block_is_a_program_or_says_what_it_takes():
    found = guide_blocks.blocks(PAGE)
    assert len(WHOLE) >= 5
    taking = ["A step in one CUDA graph", "FSDP2", "Hugging Face Trainer", "accelerate", "Lightning"]
    assert [block.heading for block in found if block.takes] == taking
    text = (guide_blocks.GUIDE / PAGE).read_text(encoding="utf-8")
    assert len(found) == text.count("```python")


@pytest.mark.promise("Hosts", "The code blocks of docs/guide/own_loop.md run as printed.")
@pytest.mark.parametrize("block", WHOLE, ids=lambda block: block.heading)
def test_a_program_runs_as_printed(block: guide_blocks.Block):
    if "torch.optim.Muon" in block.code and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon is of torch 2.9")
    exec(compile(block.code, f"{PAGE}, {block.heading}", "exec"), {"__name__": "__main__"})
