"""FP8 attention: cuDNN's kernels, through its frontend, on Hopper and later; the twin in plain torch on a CPU.

Neither torch nor Triton has an FP8 attention with a backward. cuDNN has one, and the wheel `nvidia-cudnn-frontend` calls it without a
compiler. A graph of cuDNN's is made for one shape, checked when it is made, and kept. It takes every scale as a tensor on the
device, so that one graph serves all steps and can be captured.

The kernels read and write [s, b, heads, d] as it lies. They run on torch's current stream, and take their workspace from torch.
"""

import functools
import importlib.util
import math
from typing import Any, NamedTuple

import torch

from msamp.kernels import scalar_pool
from msamp.kernels.reference import fp8_attention as twin
from msamp.kernels.reference.fp8_attention import SOFTMAX_SCALE, AttentionScales, check_heads

PACKAGE = "cudnn"
INSTALL = "pip install -e '.[cudnn]'"
CAPABILITY = (9, 0)
MULTIPLE, WIDEST = 16, 128  # of the channels of a head
HOPPER_WIDTH = 128  # the one that its backward has
NARROW = {torch.float8_e4m3fn: "FP8_E4M3", torch.float8_e5m2: "FP8_E5M2", torch.float32: "FLOAT"}


class Shape(NamedTuple):
    """What a graph is made for.

    Attributes:
        device: index of the GPU.
        sequence, batch, heads, groups, channels: the query is [sequence, batch, heads, channels], key and value have `groups` heads.
        softmax_scale: factor on the scores.
        causal: whether a token sees only those before it.
    """

    device: int
    sequence: int
    batch: int
    heads: int
    groups: int
    channels: int
    softmax_scale: float
    causal: bool

    def __str__(self) -> str:
        mask = "causal" if self.causal else "no mask"
        return f"{self.sequence} x {self.batch} x {self.heads} heads in {self.groups} groups x {self.channels}, {mask}"


class _Built(NamedTuple):
    """A graph of cuDNN's that can run: its tensors' ids by name, and the bytes of its workspace."""

    graph: Any
    ids: dict[str, int]
    workspace: int


def check_width(channels: int) -> None:
    """ValueError for heads of a width that no FP8 attention of cuDNN's takes."""
    if channels % MULTIPLE or not 0 < channels <= WIDEST:
        raise ValueError(
            f"FP8 attention takes heads of a multiple of {MULTIPLE} channels up to {WIDEST}, and they have {channels}: give other "
            "--kv-channels or --num-attention-heads, or keep the attention in BF16"
        )


def check_available(device: torch.device, channels: int) -> None:
    """Check that `device` computes FP8 attention of heads with `channels`; a CPU follows the definition.

    Raises:
        ValueError: another width of heads, a GPU before Hopper, or a machine without cuDNN's frontend.
    """
    check_width(channels)
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        raise ValueError(
            f"{torch.cuda.get_device_name(device)} (compute capability {capability[0]}.{capability[1]}) has no FP8 attention, which needs "
            f"{CAPABILITY[0]}.{CAPABILITY[1]} or later: keep the attention in BF16"
        )
    if capability[0] == CAPABILITY[0] and channels != HOPPER_WIDTH:
        raise ValueError(
            f"FP8 attention on Hopper has a backward for heads of {HOPPER_WIDTH} channels alone, and they have {channels}: give "
            f"--kv-channels {HOPPER_WIDTH}, or keep the attention in BF16"
        )
    if importlib.util.find_spec(PACKAGE) is None:
        raise ValueError(f"FP8 attention wants cuDNN's frontend, which is not installed: {INSTALL}, or keep the attention in BF16")


def prepare(query: torch.Size | tuple[int, ...], groups: int, softmax_scale: float, device: torch.device, *, causal: bool) -> None:
    """Make the graphs of a shape before they are needed, so that what cuDNN does not serve shows at once.

    Args:
        query: shape of the query, (s, b, heads, d).
        groups: heads of key and value.
        softmax_scale, causal: as for `attention_forward`.
        device: a CPU needs no graph.

    Raises:
        ValueError: as `check_available`, or cuDNN has no kernel for the shape.
    """
    check_available(device, query[3])
    if device.type == "cuda":
        s, b, heads, d = query
        shape = Shape(scalar_pool.gpu_index(device), s, b, heads, groups, d, softmax_scale, causal)
        _forward_graph(shape)
        _backward_graph(shape)


def attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale_invs: torch.Tensor,
    o_scale: torch.Tensor,
    softmax_scale: float,
    *,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `msamp.kernels.reference.fp8_attention`, which a CPU follows. ValueError also where cuDNN has no kernel for the shape."""
    if not query.is_cuda:
        return twin.attention_forward(query, key, value, scale_invs, o_scale, softmax_scale, causal=causal)
    check_heads(query, key, value)
    built = _forward_graph(_shape(query, key, softmax_scale, causal))
    s, b, heads, _ = query.shape
    softmax = _softmax_scales(query.device)
    o, stats = torch.empty_like(query), torch.empty(b, heads, s, 1, dtype=torch.float32, device=query.device)
    amaxes = scalar_pool.take(query.device, 2)
    given = {"q": query, "k": key, "v": value, "descale_s": softmax[1], "scale_s": softmax[0], "scale_o": o_scale}
    given |= {f"descale_{name}": scale_invs[i] for i, name in enumerate("qkv")}
    _execute(built, given | {"o": o, "stats": stats, "amax_s": amaxes[0], "amax_o": amaxes[1]}, query.device)
    return o, stats, amaxes[1]


def attention_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    o: torch.Tensor,
    grad_o: torch.Tensor,
    stats: torch.Tensor,
    scales: AttentionScales,
    softmax_scale: float,
    *,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `msamp.kernels.reference.fp8_attention`, which a CPU follows. ValueError also where cuDNN has no kernel for the shape."""
    if not query.is_cuda:
        return twin.attention_backward(query, key, value, o, grad_o, stats, scales, softmax_scale, causal=causal)
    check_heads(query, key, value)
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
    return Shape(scalar_pool.gpu_index(query.device), s, b, heads, key.shape[2], d, softmax_scale, causal)


@functools.cache
def _softmax_scales(device: torch.device) -> torch.Tensor:
    """FP32 [2]: the scale of S, and its inverse."""
    return torch.tensor([SOFTMAX_SCALE, 1 / SOFTMAX_SCALE], device=device, dtype=torch.float32)


@functools.cache
def _handle(index: int) -> Any:
    """cuDNN's handle of a GPU."""
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
    """A graph of cuDNN's while it is drawn."""

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
        """Sizes, strides and type of a tensor [s, b, heads, d] as cuDNN reads it, [b, heads, s, d]."""
        s, b, d = self.shape.sequence, self.shape.batch, self.shape.channels
        n = self.shape.groups if name in ("k", "v", "dK", "dV") else self.shape.heads
        return [b, n, s, d], [n * d, d, b * n * d, 1], getattr(self.types, NARROW[dtype])

    def statistics(self) -> tuple[list[int], list[int], Any]:
        s, b, n = self.shape.sequence, self.shape.batch, self.shape.heads
        return [b, n, s, 1], [n * s, s, 1, 1], self.types.FLOAT

    def scalar(self) -> tuple[list[int], list[int], Any]:
        return [1, 1, 1, 1], [1, 1, 1, 1], self.types.FLOAT

    def reads(self, name: str, kind: tuple[list[int], list[int], Any]) -> Any:
        """An input."""
        self.tensors[name] = self.graph.tensor(dim=kind[0], stride=kind[1], data_type=kind[2], name=name)
        return self.tensors[name]

    def writes(self, name: str, made: Any, kind: tuple[list[int], list[int], Any]) -> None:
        """An output."""
        self.tensors[name] = made.set_output(True).set_dim(kind[0]).set_stride(kind[1]).set_data_type(kind[2])

    def build(self) -> _Built:
        """ValueError with cuDNN's own words where it has no kernel."""
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
        made = drawing.graph.sdpa_fp8_backward(**arguments, attn_scale=shape.softmax_scale, use_causal_mask=shape.causal)
        for name, gradient in zip(("dQ", "dK", "dV"), made[:3], strict=True):
            drawing.writes(name, gradient, drawing.heads_of(name, e5m2))
        for name, found in zip(("dQ", "dK", "dV", "dP"), made[3:], strict=True):
            drawing.writes(f"amax_{name}", found, scalar)
        return drawing.build()


def default_scale(channels: int) -> float:
    """The factor on the scores that attention has by default: 1 / sqrt(d)."""
    return 1.0 / math.sqrt(channels)
