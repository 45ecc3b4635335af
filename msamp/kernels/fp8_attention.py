"""FP8 attention with cuDNN's kernels, through its frontend, on Hopper and later, and with the reference twin in plain torch on a CPU.

Neither torch nor Triton has FP8 attention with a backward. cuDNN does, and the wheel `nvidia-cudnn-frontend` calls it without a compiler. A
cuDNN graph is built and checked once per shape, then cached. All scales are tensors on the device, so one graph works for all steps and can
be captured in a CUDA graph.

The kernels read and write the layout [s, b, heads, d] directly, run on torch's current stream, and allocate their workspace from torch.
"""

import functools
import importlib.util
import math
from typing import Any, NamedTuple

import torch

from msamp.kernels import scalar_pool
from msamp.kernels.reference import fp8_attention as twin
from msamp.kernels.reference.attention_part import check_parts
from msamp.kernels.reference.fp8_attention import SOFTMAX_SCALE
from msamp.numerics.formats import E4M3, E5M2

PACKAGE = "cudnn"
INSTALL = "pip install -e '.[cudnn]'"
CAPABILITY = (9, 0)
MULTIPLE, WIDEST = 16, 128  # channels per head: a multiple of the first, at most the second
HOPPER_WIDTH = 128  # the only one that Hopper's backward supports
# What makes up for roundings (`Format.gain`) on the way to dQ and dK (dO, dP and the result in E5M2, values and keys or queries in E4M3)
# and to dV (dO and the result in E5M2, S in E4M3).
GAINS = (E5M2.gain**3 * E4M3.gain**2,) * 2 + (E5M2.gain**2 * E4M3.gain,)
NARROW = {torch.float8_e4m3fn: "FP8_E4M3", torch.float8_e5m2: "FP8_E5M2", torch.float32: "FLOAT"}


class Shape(NamedTuple):
    """The shape and settings of a cuDNN graph.

    Attributes:
        device: index of the GPU.
        sequence, batch, heads, channels: of the query, [sequence, batch, heads, channels].
        keys, groups: key and value are [keys, batch, groups, channels]; with a causal mask keys is sequence.
        softmax_scale: factor of the scores.
        causal: whether a token attends only to itself and earlier tokens.
    """

    device: int
    sequence: int
    keys: int
    batch: int
    heads: int
    groups: int
    channels: int
    softmax_scale: float
    causal: bool

    def __str__(self) -> str:
        mask = "causal" if self.causal else "no mask"
        over = "" if self.keys == self.sequence else f" over {self.keys} keys"
        return f"{self.sequence}{over} x {self.batch} x {self.heads} heads in {self.groups} groups x {self.channels}, {mask}"


class _Built(NamedTuple):
    """A built cuDNN graph, its tensors' ids by name, and the size of its workspace in bytes."""

    graph: Any
    ids: dict[str, int]
    workspace: int


def check_width(channels: int) -> None:
    """Raise a ValueError if cuDNN has no FP8 attention for this head width."""
    if channels % MULTIPLE or not 0 < channels <= WIDEST:
        raise ValueError(
            f"heads have {channels} channels; FP8 attention requires a multiple of {MULTIPLE} up to {WIDEST}: change --kv-channels or "
            "--num-attention-heads, or keep the attention in BF16"
        )


def check_available(device: torch.device, channels: int) -> None:
    """Check that `device` supports FP8 attention for heads with `channels`; a CPU runs the reference twin.

    Raises:
        ValueError: if the head width is not supported, the GPU is older than Hopper, or cuDNN's frontend is not installed.
    """
    check_width(channels)
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        raise ValueError(
            f"{torch.cuda.get_device_name(device)} (compute capability {capability[0]}.{capability[1]}) has no FP8 attention, which "
            f"requires {CAPABILITY[0]}.{CAPABILITY[1]} or later: keep the attention in BF16"
        )
    if capability[0] == CAPABILITY[0] and channels != HOPPER_WIDTH:
        raise ValueError(
            f"heads have {channels} channels; the backward of FP8 attention on Hopper requires {HOPPER_WIDTH}: use "
            f"--kv-channels {HOPPER_WIDTH}, or keep the attention in BF16"
        )
    if importlib.util.find_spec(PACKAGE) is None:
        raise ValueError(f"FP8 attention requires cuDNN's frontend, which is not installed: {INSTALL}, or keep the attention in BF16")


def prepare(
    query: torch.Size | tuple[int, ...],
    groups: int,
    softmax_scale: float,
    device: torch.device,
    *,
    causal: bool,
    keys: int,
    gradients: bool,
) -> None:
    """Build the graph for a shape in advance, so that an unsupported shape fails early.

    Args:
        query: shape of the query, (s, b, heads, d).
        groups: number of heads of key and value.
        softmax_scale, causal: as for `attention_forward`.
        device: a CPU needs no graph.
        keys: number of keys.
        gradients: whether for the gradient kernel instead of the forward kernel.

    Raises:
        ValueError: as in `check_available`, or if cuDNN has no kernel for the shape.
    """
    check_available(device, query[3])
    if device.type == "cuda":
        s, b, heads, d = query
        shape = Shape(scalar_pool.gpu_index(device), s, keys, b, heads, groups, d, softmax_scale, causal)
        (_backward_graph if gradients else _forward_graph)(shape)


def attention_forward(query, key, value, scale_invs, o_scale, softmax_scale, *, causal):
    """See `msamp.kernels.reference.fp8_attention`, which runs on a CPU. Also raise a ValueError if cuDNN has no kernel for the shape."""
    if not query.is_cuda:
        return twin.attention_forward(query, key, value, scale_invs, o_scale, softmax_scale, causal=causal)
    check_parts(query, key, value, causal=causal)
    built = _forward_graph(_shape(query, key, softmax_scale, causal))
    s, b, heads, _ = query.shape
    softmax = _softmax_scales(query.device)
    o, stats = torch.empty_like(query), torch.empty(b, heads, s, 1, dtype=torch.float32, device=query.device)
    amaxes = scalar_pool.take(query.device, 2)
    given = {"q": query, "k": key, "v": value, "descale_s": softmax[1], "scale_s": softmax[0], "scale_o": o_scale}
    given |= {f"descale_{name}": scale_invs[i] for i, name in enumerate("qkv")}
    _execute(built, given | {"o": o, "stats": stats, "amax_s": amaxes[0], "amax_o": amaxes[1]}, query.device)
    return o, stats, amaxes[1]


def attention_backward(query, key, value, o, grad_o, stats, scales, softmax_scale, *, causal):
    """See `msamp.kernels.reference.fp8_attention`, which runs on a CPU. Also raise a ValueError if cuDNN has no kernel for the shape."""
    if not query.is_cuda:
        return twin.attention_backward(query, key, value, o, grad_o, stats, scales, softmax_scale, causal=causal)
    check_parts(query, key, value, causal=causal)
    built = _backward_graph(_shape(query, key, softmax_scale, causal))
    softmax = _softmax_scales(query.device)
    dq, dk, dv = (torch.empty_like(x, dtype=torch.float8_e5m2) for x in (query, key, value))
    amaxes = scalar_pool.take(query.device, 4)
    given = {"q": query, "k": key, "v": value, "o": o, "dO": grad_o, "stats": stats, "descale_s": softmax[1], "scale_s": softmax[0]}
    given |= {"descale_o": scales.o, "descale_dO": scales.grad_o, "descale_dP": scales.dp_scale_inv}
    given |= {f"descale_{name}": scales.qkv[i] for i, name in enumerate("qkv")}
    for i, name in enumerate(("dP", "dQ", "dK", "dV")):
        given |= {f"scale_{name}": scales.gradients[i], f"amax_{name}": amaxes[i]}
    _execute(built, given | {"dQ": dq, "dK": dk, "dV": dv}, query.device)
    return dq, dk, dv, amaxes


def _shape(query: torch.Tensor, key: torch.Tensor, softmax_scale: float, causal: bool) -> Shape:
    s, b, heads, d = query.shape
    return Shape(scalar_pool.gpu_index(query.device), s, key.shape[0], b, heads, key.shape[2], d, softmax_scale, causal)


@functools.cache
def _softmax_scales(device: torch.device) -> torch.Tensor:
    """Return the scale of S and its inverse, FP32 [2]."""
    return torch.tensor([SOFTMAX_SCALE, 1 / SOFTMAX_SCALE], device=device, dtype=torch.float32)


@functools.cache
def _handle(index: int) -> Any:
    """Return cuDNN's handle for a GPU."""
    import cudnn

    with torch.cuda.device(index):
        return cudnn.create_handle()


def _execute(built: _Built, given: dict[str, torch.Tensor], device: torch.device) -> None:
    import cudnn

    index = scalar_pool.gpu_index(device)
    handle, workspace = _handle(index), torch.empty(max(1, built.workspace), dtype=torch.uint8, device=device)
    with torch.cuda.device(index):
        cudnn.set_stream(handle, torch.cuda.current_stream().cuda_stream)
        built.graph.execute({built.ids[name]: x.contiguous() for name, x in given.items()}, workspace, handle=handle)


class _Drawing:
    """A cuDNN graph under construction."""

    def __init__(self, shape: Shape) -> None:
        check_available(torch.device("cuda", shape.device), shape.channels)
        import cudnn

        self.shape, self.types = shape, cudnn.data_type
        self.tensors: dict[str, Any] = {}
        self.graph = cudnn.pygraph(
            io_data_type=self.types.FP8_E4M3,
            intermediate_data_type=self.types.FLOAT,
            compute_data_type=self.types.FLOAT,
            handle=_handle(shape.device),
        )

    def heads_of(self, name: str, dtype: torch.dtype) -> tuple[list[int], list[int], Any]:
        """Return sizes, strides and type of a tensor [s, b, heads, d] in cuDNN's order [b, heads, s, d]."""
        shape, b, d = self.shape, self.shape.batch, self.shape.channels
        s, n = (shape.keys, shape.groups) if name in ("k", "v", "dK", "dV") else (shape.sequence, shape.heads)
        return [b, n, s, d], [n * d, d, b * n * d, 1], getattr(self.types, NARROW[dtype])

    def statistics(self) -> tuple[list[int], list[int], Any]:
        s, b, n = self.shape.sequence, self.shape.batch, self.shape.heads
        return [b, n, s, 1], [n * s, s, 1, 1], self.types.FLOAT

    def scalar(self) -> tuple[list[int], list[int], Any]:
        return [1, 1, 1, 1], [1, 1, 1, 1], self.types.FLOAT

    def reads(self, name: str, kind: tuple[list[int], list[int], Any]) -> Any:
        """Add an input."""
        self.tensors[name] = self.graph.tensor(dim=kind[0], stride=kind[1], data_type=kind[2], name=name)
        return self.tensors[name]

    def writes(self, name: str, output: Any, kind: tuple[list[int], list[int], Any]) -> None:
        """Add an output."""
        self.tensors[name] = output.set_output(True).set_dim(kind[0]).set_stride(kind[1]).set_data_type(kind[2])

    def build(self) -> _Built:
        """Build the graph; ValueError with cuDNN's own message if it has no kernel."""
        import cudnn

        graph = self.graph
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A])
            graph.check_support()
            graph.build_plans()
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
            why = " ".join(str(error).split())
            raise ValueError(
                f"cuDNN {cudnn.backend_version()} has no FP8 attention for {self.shape} ({why}): keep the attention in BF16"
            ) from error
        return _Built(graph, {name: x.get_uid() for name, x in self.tensors.items()}, graph.get_workspace_size())


@functools.cache
def _forward_graph(shape: Shape) -> _Built:
    with torch.cuda.device(shape.device):
        drawing = _Drawing(shape)
        e4m3, scalar = torch.float8_e4m3fn, drawing.scalar()
        arguments = {name: drawing.reads(name, drawing.heads_of(name, e4m3)) for name in "qkv"}
        names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        arguments |= {name: drawing.reads(name, scalar) for name in names}
        o, stats, amax_s, amax_o = drawing.graph.sdpa_fp8(
            **arguments, is_inference=False, attn_scale=shape.softmax_scale, use_causal_mask=shape.causal
        )
        drawing.writes("o", o, drawing.heads_of("o", e4m3))
        drawing.writes("stats", stats, drawing.statistics())
        drawing.writes("amax_s", amax_s, scalar)
        drawing.writes("amax_o", amax_o, scalar)
        return drawing.build()


@functools.cache
def _backward_graph(shape: Shape) -> _Built:
    with torch.cuda.device(shape.device):
        drawing = _Drawing(shape)
        e4m3, e5m2, scalar = torch.float8_e4m3fn, torch.float8_e5m2, drawing.scalar()
        arguments = {name: drawing.reads(name, drawing.heads_of(name, e4m3)) for name in ("q", "k", "v", "o")}
        arguments |= {"dO": drawing.reads("dO", drawing.heads_of("dO", e5m2)), "stats": drawing.reads("stats", drawing.statistics())}
        descales = [f"descale_{name}" for name in ("q", "k", "v", "o", "dO", "s", "dP")]
        scales = [f"scale_{name}" for name in ("s", "dQ", "dK", "dV", "dP")]
        arguments |= {name: drawing.reads(name, scalar) for name in (*descales, *scales)}
        outputs = drawing.graph.sdpa_fp8_backward(**arguments, attn_scale=shape.softmax_scale, use_causal_mask=shape.causal)
        for name, gradient in zip(("dQ", "dK", "dV"), outputs[:3], strict=True):
            drawing.writes(name, gradient, drawing.heads_of(name, e5m2))
        for name, tensor in zip(("dQ", "dK", "dV", "dP"), outputs[3:], strict=True):
            drawing.writes(f"amax_{name}", tensor, scalar)
        return drawing.build()


def default_scale(channels: int) -> float:
    """Return attention's default factor of the scores: 1 / sqrt(d)."""
    return 1.0 / math.sqrt(channels)
