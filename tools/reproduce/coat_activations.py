"""COAT, part 2: what keeping the inputs of norms and GELU/SwiGLU in FP8 loses and saves, by granularity; on a checkpoint.

    python -m megatron.lm.pretrain --opt-level O2 --save checkpoints ...
    python tools/reproduce/coat_activations.py --load checkpoints --text FILE --csv tools/reproduce/results/coat_activations.csv

The model reads the beginning of FILE. Its layers' norm inputs and activation inputs, all layers together, and its norm inputs with every
32nd channel 50 times as large and with every 64th token 100,000 times as large, are kept in E4M3 with one power-of-two scale for groups of
16, 32 and 64 channels, for the tensor, and for groups of 16 tokens, which the page warns of at a norm's input:

- bytes: of an element, scale included (BF16 has 2). sqnr_db, underflow, saturation: of what is kept. worst_token_db: the least SQNR of
  one token's channels, which the large tokens do not hide.
- weight_kept_db, weight_again_db: of the gradient of the next linear layer's weight, for a random grad_output in E5M2: with the layer's
  FP8 input kept beside, one byte an element more, and with it made again from what is kept here, as the fused blocks do.

And the bytes that a layer keeps of a token, for norm and activation inputs (non-linear) and for all else, as the dry run predicts them.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.lm import entry
from megatron.lm.tools.arguments import Parser, count, output_file, path
from megatron.lm.tools.files import read_text
from msamp.kernels import ops
from msamp.nn.saved import GroupedFP8, Parts, Saved
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.metrics import saturation_frac, sqnr_db, underflow_frac
from msamp.numerics.quantize import dequantize
from tools.bench import rows

if TYPE_CHECKING:
    from megatron.lm.config import Config

MEASURES = ("bytes", "sqnr_db", "worst_token_db", "underflow", "saturation", "weight_kept_db", "weight_again_db")
COLUMNS = ("what", "kept", *MEASURES, "non_linear", "other")
OUTPUTS = 256  # of the linear layer with the weight gradient that is looked at
EPS = 1e-5


@dataclass(frozen=True)
class OneScale:
    """E4M3 with one scale for the tensor, as a linear layer's input has."""

    def element_bytes(self, wide: int) -> float:
        """1."""
        return 1.0

    def keep(self, x: Tensor) -> Parts:
        """(payload, scale_inv)"""
        return ops.cast_transpose(x, None, None, E4M3.dtype, row=True)[0::2][:2]

    def restore(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """The values kept."""
        return dequantize(parts[0], parts[1], dtype)


WAYS: Mapping[str, Saved] = {f"groups of {size} channels": GroupedFP8(size=size) for size in (16, 32, 64)} | {
    "tensor": OneScale(),
    "groups of 16 tokens": GroupedFP8(axis=0),
}


def inputs(model: torch.nn.Module, tokens: Tensor) -> dict[str, list[Tensor]]:
    """Inputs [tokens, channels] of the norms and of the activation of every layer, for `tokens` [b, s]."""
    from megatron.lm.model.layer import Layer

    found: dict[str, list[Tensor]] = {"norm input": [], "activation input": []}
    handles = []
    for layer in (module for module in model.modules() if isinstance(module, Layer)):
        for norm in (layer.input_layernorm, layer.pre_mlp_layernorm):
            handles.append(norm.register_forward_pre_hook(lambda _, args: found["norm input"].append(args[0].flatten(0, 1))))

        def activated(_: Any, args: Any, output: tuple[Tensor, Tensor | None]) -> None:
            y, bias = output
            found["activation input"].append((y if bias is None else y + bias).flatten(0, 1))

        handles.append(layer.mlp.linear_fc1.register_forward_hook(activated))  # which also keeps the layer from being fused
    with torch.no_grad():
        model(tokens, torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens), None)
    for handle in handles:
        handle.remove()
    return found


def weight_gradients(x: Tensor, again: Tensor, what: str, kind: str) -> tuple[float, float]:
    """SQNR of the gradient of the next linear layer's weight: with its FP8 input kept, and made again from `again`, what is kept of `x`."""
    if what == "activation input":
        exact = ops.activate(x, kind, None, None, torch.float32)[0]
        scale_inv = ops.activate(x, kind, None, None, E4M3.dtype)[1]
        kept, made = (dequantize(ops.activate(y, kind, scale_inv.reciprocal(), None, E4M3.dtype)[0], scale_inv) for y in (x, again))
    else:
        one = torch.ones(x.shape[1], device=x.device)
        _, exact, _, mean, rstd = ops.normalize(x, None, one, None, EPS, None, None, torch.float32, rms=False)
        scale_inv = ops.normalize(x, None, one, None, EPS, None, None, E4M3.dtype, rms=False)[2]
        operands = (ops.normalize_transposed(y, mean, rstd, one, None, scale_inv, E4M3.dtype, rms=False) for y in (x, again))
        kept, made = (dequantize(operand, scale_inv).t() for operand in operands)
    grad = torch.randn(x.shape[0], OUTPUTS, generator=torch.Generator().manual_seed(0)).to(x.device)
    payload, _, grad_scale_inv, _ = ops.cast_transpose(grad, None, None, E5M2.dtype, row=True)
    rounded = dequantize(payload, grad_scale_inv)
    wanted = grad.t() @ exact
    return sqnr_db(wanted, rounded.t() @ kept), sqnr_db(wanted, rounded.t() @ made)


def error_row(xs: Sequence[Tensor], way: Saved, what: str, kind: str) -> dict[str, Any]:
    """The measures of one way to keep all of `xs`: SQNR and shares over all of their elements, of weight gradients the least."""
    parts = [way.keep(x) for x in xs]
    backs = [way.restore(part, x.dtype) for part, x in zip(parts, xs, strict=True)]
    x, back, payload = (torch.cat([t.flatten() for t in of]) for of in (xs, backs, [part[0].float() for part in parts]))
    noise = torch.cat([(b.float() - a.float()).square().sum(1) / a.float().square().sum(1) for a, b in zip(xs, backs, strict=True)])
    kept, again = zip(*(weight_gradients(a, b, what, kind) for a, b in zip(xs, backs, strict=True)), strict=True)
    measured = {
        "bytes": way.element_bytes(2),
        "sqnr_db": sqnr_db(x, back),
        "worst_token_db": -10 * noise.max().log10().item(),
        "underflow": underflow_frac(x, back),
        "saturation": saturation_frac(payload, E4M3),
        "weight_kept_db": min(kept),
        "weight_again_db": min(again),
    }
    return {name: f"{value:.4g}" for name, value in measured.items()}


def bytes_rows(config: "Config") -> Iterator[dict[str, Any]]:
    """The bytes that a layer keeps of a token at O0 and O2, with both values of --save-activations."""
    from megatron.lm import plan
    from megatron.lm.config import PrecisionConfig
    from megatron.lm.recipe import saved_activations

    model = config.model
    tokens = model.seq_length * config.training.micro_batch_size
    for level in ("O0", "O2"):
        for way in ("compute", "coat"):
            precision = PrecisionConfig(opt_level=level, save_activations=way)
            found = replace(config, precision=precision)
            channels = 2 * model.hidden_size + model.ffn_size * (2 if model.swiglu else 1)
            # SwiGLU's own operations keep the two factors of its product beside its input.
            factors = 2 * 2 * model.ffn_size if model.swiglu and way == "compute" and not found.fuses_layers else 0
            whole, non_linear = plan.layer_activations(found) / tokens, saved_activations(precision).element_bytes(2) * channels + factors
            yield {
                "what": f"{level}, bytes a token and layer",
                "kept": way,
                "non_linear": f"{non_linear:g}",
                "other": f"{whole - non_linear:g}",
            }


def table(found: Mapping[str, Sequence[Tensor]], kind: str) -> Iterator[dict[str, Any]]:
    """Rows of the errors; `kind` of the activation."""
    norms = found["norm input"]
    channels, tokens = (torch.ones(norms[0].shape[i], device=norms[0].device, dtype=norms[0].dtype) for i in (1, 0))
    channels[::32], tokens[::64] = 50.0, 1e5
    cases = dict(found) | {
        "norm input, large channels": [x * channels for x in norms],
        "norm input, large tokens": [x * tokens[:, None] for x in norms],
    }
    for what, xs in cases.items():
        for name, way in WAYS.items():
            yield {"what": what, "kept": name} | error_row(xs, way, what, kind)


@entry.command
def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0, or 2 for bad input."""
    parser = Parser(description=__doc__)
    parser.add_argument("--load", type=path, required=True, help="folder of checkpoints (the newest is taken), or of one")
    parser.add_argument("--text", type=path, required=True, help="text; the model reads its beginning")
    parser.add_argument("--sequences", type=count(1), default=4, help="of the model's length (default: %(default)s)")
    parser.add_argument("--csv", type=output_file, help="file to append the rows to")
    options = parser.parse_args(arguments)
    from megatron.lm.checkpoint import load_for_inference
    from megatron.lm.process_groups import shutdown

    try:
        model, config, tokenizer = load_for_inference(options.load)
        wanted = options.sequences * config.model.seq_length
        read = tokenizer.tokenize(read_text(options.text, "a text in UTF-8"))[:wanted]
        if len(read) < wanted or not read:
            raise ValueError(f"--text {options.text} has {len(read)} tokens, and {wanted} are needed: give a longer one")
        tokens = torch.tensor(read, device=next(model.parameters()).device).view(options.sequences, -1)
        kind = "swiglu" if config.model.swiglu else "gelu"
        lines = [*table(inputs(model, tokens), kind), *bytes_rows(config)]
        lines = [dict.fromkeys(COLUMNS, "") | line for line in lines]
        if options.csv:
            run = {"model": f"{config.model.num_layers}x{config.model.hidden_size}"}
            rows.append(options.csv, [run | line | rows.machine() for line in lines])
    finally:
        shutdown()
    widths = {name: max(len(name), *(len(str(line[name])) for line in lines)) for name in COLUMNS}
    for line in [dict(zip(COLUMNS, COLUMNS, strict=True)), *lines]:
        print("  ".join(str(line[name]).rjust(widths[name]) for name in COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
