"""Momentum updates in FP32: SGD with momentum [Sutskever et al. 2013], and Muon, which orthogonalizes a matrix's momentum [Jordan et al.
2024].

Operations are in torch.optim's order, so that FP32 states are equal bit for bit. Hyperparameters are Python floats, or on a GPU
FP64 0-dim tensors, so that the host never waits.
"""

import math
from collections.abc import Callable, Sequence

import torch

Number = float | torch.Tensor
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic polynomial, steep at 0 for small singular values [Jordan et al. 2024]


def _original(rows: int, columns: int) -> float:
    """Set the spectral norm of a step from the matrix's shape [Jordan et al. 2024]."""
    return math.sqrt(max(1.0, rows / columns))


def _match_rms_adamw(rows: int, columns: int) -> float:
    """Give a step the root mean square 0.2 of AdamW's steps, for any shape [Liu et al. 2025, equation 4]."""
    return 0.2 * math.sqrt(max(rows, columns))


# Factor of the learning rate by `adjust_lr_fn`, with the names of torch.optim.Muon.
ADJUSTMENTS: dict[str | None, Callable[[int, int], float]] = {None: _original, "original": _original, "match_rms_adamw": _match_rms_adamw}


def heavy_ball_(
    p: torch.Tensor,
    g: torch.Tensor,
    buffer: torch.Tensor | None,
    lr: Number,
    momentum: Number,
    dampening: Number,
    weight_decay: Number | None,
    first: torch.Tensor | None,
    *,
    nesterov: bool,
    decoupled: bool,
) -> None:
    """Take one step of SGD: buffer = momentum buffer + (1 - dampening) g, p = p - lr buffer.

    Args:
        p, g, buffer: FP32, of one shape; `g` is only read. Without a buffer the step is g.
        lr, momentum, dampening: of the group.
        weight_decay: None for no decay.
        first: bool 0-dim, whether this is the first step, which is not dampened; None without dampening.
        nesterov: whether the step is g + momentum buffer.
        decoupled: apply the decay to the weight instead of adding it to the gradient.
    """
    if weight_decay is not None:
        if decoupled:
            p.mul_(1 - lr * weight_decay)
        else:
            g = add_(g.clone(), p, weight_decay)
    step = g
    if buffer is not None:
        kept = buffer.mul_(momentum) if first is None else torch.where(first, 0.0, buffer * momentum)
        buffer.copy_(add_(kept, g, 1 - dampening) if first is None else torch.where(first, g, add_(kept, g, 1 - dampening)))
        step = add_(g.clone(), buffer, momentum) if nesterov else buffer
    add_(p, step, -lr)


def muon_(
    p: torch.Tensor,
    g: torch.Tensor,
    buffer: torch.Tensor,
    lr: Number,
    momentum: Number,
    weight_decay: Number | None,
    *,
    nesterov: bool,
    ns_coefficients: Sequence[float],
    eps: float,
    ns_steps: int,
    adjust_lr_fn: str | None,
) -> None:
    """Take one step of Muon: buffer = momentum buffer + (1 - momentum) g, p = (1 - lr weight_decay) p - lr' orthogonal(buffer).

    Args:
        p, g, buffer: FP32 [rows, columns]; `g` is only read.
        lr, momentum, weight_decay: of the group; weight_decay None for no decay.
        nesterov: orthogonalize momentum buffer + (1 - momentum) g instead of the buffer.
        ns_coefficients, ns_steps, eps: of `orthogonal`.
        adjust_lr_fn: key of `ADJUSTMENTS`; its function of the shape times lr is lr'.
    """
    buffer.lerp_(g, _weight(1 - momentum))
    step = orthogonal(g.lerp(buffer, _weight(momentum)) if nesterov else buffer, ns_coefficients, ns_steps, eps)
    if weight_decay is not None:
        p.mul_(1 - lr * weight_decay)
    add_(p, step, -(lr * ADJUSTMENTS[adjust_lr_fn](*p.shape)))


def orthogonal(x: torch.Tensor, coefficients: Sequence[float], steps: int, eps: float) -> torch.Tensor:
    """Return U S' V^T for x = U S V^T, BF16 [rows, columns], with singular values S' between about 0.7 and 1.2. It takes Newton-Schulz
    steps a X + (b A + c A^2) X, A = X X^T, starting at x divided by its Frobenius norm, or by `eps` if that is larger."""
    a, b, c = coefficients
    wide = x.shape[0] <= x.shape[1]
    y = (x if wide else x.T).bfloat16()
    y = y / y.norm().clamp(min=eps)
    for _ in range(steps):
        gram = y @ y.T
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y if wide else y.T


def add_(x: torch.Tensor, y: torch.Tensor, factor: Number) -> torch.Tensor:
    """Add factor * y to x in place."""
    return x.addcmul_(y.to(x.dtype), factor.to(x.dtype)) if isinstance(factor, torch.Tensor) else x.add_(y, alpha=factor)


def _weight(x: Number) -> Number:
    """Return `x` in the type that lerp requires with FP32 tensors."""
    return x.float() if isinstance(x, torch.Tensor) else x
