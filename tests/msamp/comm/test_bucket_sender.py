import pytest
import torch
from torch import nn

from helpers.numerics import make
from helpers.synced import model_of, synced
from msamp.comm.bucket import Bucket
from msamp.comm.bucket_sender import BucketSender
from msamp.comm.grad_scaling import ABSENT, scales_of
from msamp.numerics.formats import E4M3
from msamp.numerics.scaling import scale_from_amax
from msamp.numerics.tensor import ScalingTensor

SHAPES = {"fp8-e4m3_a": (4, 8), "fp8-e4m3_b": (8,)}


def alone(model: nn.ParameterDict) -> tuple[BucketSender, list[torch.Tensor]]:
    """The sender of a synchroniser for one process, and a gradient for each parameter of its only bucket, in the bucket's order."""
    sender = synced(model).sender
    (bucket,) = sender._places
    return sender, [make("normal", tuple(p.shape), seed) for seed, p in enumerate(bucket.params)]


def only_bucket(sender: BucketSender) -> Bucket:
    (bucket,) = sender._places
    return bucket


def test_the_steps_one_by_one_are_those_of_send():
    sender, gradients = alone(model_of(SHAPES))
    bucket = only_bucket(sender)
    proposals = sender.agree(bucket, gradients)
    assert proposals.equal(torch.stack([scale_from_amax(g.abs().max(), E4M3.max) for g in gradients]))
    factor = scales_of(proposals)
    flat = sender.pack(bucket, gradients, factor)
    reduced, agreed = sender.reduce(bucket, flat, factor, proposals)
    assert agreed is proposals
    sender.deliver(bucket, reduced, agreed)
    apart = [p.main_grad for p in bucket.params]
    bucket.clear()
    bucket.gradients = list(gradients)
    sender.send(bucket, last=True)
    for one, g, p in zip(apart, gradients, bucket.params, strict=True):
        assert one.payload.view(torch.uint8).equal(p.main_grad.payload.view(torch.uint8))
        assert one.scale_inv == p.main_grad.scale_inv == ScalingTensor.quantize(g, E4M3).scale_inv


def test_what_is_not_the_last_waits_at_its_owner_and_is_not_delivered():
    sender, gradients = alone(model_of(SHAPES))
    bucket = only_bucket(sender)
    for last in (False, True):
        bucket.clear()
        bucket.gradients = list(gradients)
        sender.send(bucket, last=last)
        assert (bucket in sender.owner_sums) is not last
        assert all((p.main_grad is not None) is last for p in bucket.params)
    for g, p in zip(gradients, bucket.params, strict=True):
        once = ScalingTensor.quantize(g, E4M3)
        assert p.main_grad.dequantize(torch.float32).equal(2 * once.dequantize(torch.float32))


def test_a_gradient_that_is_missing_is_packed_as_zeros_and_not_delivered():
    sender, gradients = alone(model_of(SHAPES))
    bucket = only_bucket(sender)
    proposals = sender.agree(bucket, [gradients[0], None])
    assert proposals[1] == ABSENT
    flat = sender.pack(bucket, [gradients[0], None], scales_of(proposals))
    assert bucket.unflatten(flat)[1].float().count_nonzero() == 0
    bucket.gradients = [gradients[0], None]
    sender.send(bucket, last=True)
    assert bucket.absent == {1}
    assert bucket.params[1].main_grad is None


@pytest.mark.parametrize("watched", [False, True])
def test_statistics_look_on_where_they_are_active(watched):
    sender, gradients = alone(model_of(SHAPES))
    sender.statistics.watch(watched)
    bucket = only_bucket(sender)
    bucket.gradients = list(gradients)
    sender.send(bucket, last=True)
    assert bool(sender.statistics.counts.any()) is watched
