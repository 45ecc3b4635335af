"""Models of torchvision: layers whose weights others read, in-place activations, convolutions."""

import pytest
import torch

import msamp

try:
    import torchvision
except (ImportError, RuntimeError) as error:  # a build for another torch fails while it registers its operators
    pytest.skip(f"torchvision: {error}", allow_module_level=True)


@pytest.mark.nightly(20)
def test_swin_trains():
    model = torchvision.models.SwinTransformer([4, 4], 32, [1, 1], [2, 2], [4, 4], num_classes=32)
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    x, losses = torch.randn(2, 3, 32, 32), []
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(model(x), torch.tensor([0, 1]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a_convolutional_network_says_how_little_becomes_fp8():
    with pytest.warns(UserWarning, match=r"less than half of the model's products(.*\n)+.*a convolution"):
        msamp.initialize(torchvision.models.resnet18(num_classes=16))
