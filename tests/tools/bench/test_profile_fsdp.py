import torch.distributed

from helpers import dist
from tools.bench import bench_fsdp, profile_fsdp

TINY = "--layers 1 --hidden 32 --heads 2 --ffn 48 --vocab-size 32 --seq-length 16 --micro-batch-size 2"


def profiled() -> tuple[dict[str, tuple[float, float]], str]:
    step = profile_fsdp.Steps("O2", bench_fsdp.parser().parse_args(TINY.split()), torch.device("cpu"))
    return profile_fsdp.phases(step, 2), profile_fsdp.host_functions(step, 1, 400)


def test_phases_add_up_to_the_step_and_the_backward_is_in_the_host_s_profile():
    for spans, text in dist.run(profiled, 2):
        *parts, (whole, same) = spans.values()
        assert list(spans) == list(profile_fsdp.PHASES)
        assert whole == same
        assert 0.5 * whole < sum(host for host, _ in parts) < 2 * whole
        assert "linear_fn.py" in text
        assert "(backward)" in text
