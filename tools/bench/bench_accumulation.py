"""What the sums of FP8 products lose in the tensor cores, on the activations and gradients of a pre-trained model.

    python tools/bench/bench_accumulation.py FOLDER TEXT                    a folder of Hugging Face, a text of at least --tokens tokens
    python tools/bench/bench_accumulation.py FOLDER TEXT --outlier 200      with one input channel of every layer as many times larger

The model runs forward and backward in FP32. Of each linear layer's three products a sample is computed from E4M3 and E5M2 codes by
`msamp.numerics.accumulation`, which has the bits of an H200, so no GPU is needed: slope and SQNR in dB of fast and full accumulation
against exact sums, by kind of layer. The last lines are what FP8 attention depends on: the share of the energy of values, and of the
gradient of attention's output, in their mean per channel; the first token's weight, and the norm of its value relative to the others'. It
requires transformers. Measurements are appended to --csv.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count, path
from msamp.numerics.accumulation import compared, judge_sums, product
from msamp.numerics.formats import E4M3, E5M2, Format
from msamp.numerics.granularity import TENSORWISE
from msamp.numerics.quantize import quantize
from msamp.numerics.scaling import scale_from_amax
from tools.bench import rows

SAMPLE = (16, 256)
Tallies = dict[tuple[str, str, int, str], list[Tensor]]


def codes(x: Tensor, fmt: Format) -> Tensor:
    """Cast with the tensor's just-in-time scale."""
    return quantize(x, scale_from_amax(TENSORWISE.amax(x), fmt.max), fmt)


def sampled(x: Tensor, most: int) -> Tensor:
    return x[:: max(1, -(-len(x) // most))].contiguous()


def compare(tallies: Tallies, kind: str, name: str, a: Tensor, b: Tensor) -> None:
    """Add the sums of a sample of `a b^T`, [M, K] and [N, K] FP8."""
    a, b = sampled(a, SAMPLE[0]), sampled(b, SAMPLE[1])
    want = a.double() @ b.double().t()
    for accumulation in ("fast", "full"):
        got = product(a, b, accumulation).double()
        tallies[kind, name, a.shape[1], accumulation].append(compared(got, want))


def mean_share(x: Tensor) -> float:
    """Return the share of the energy of [tokens, channels] in the mean over the tokens."""
    return float(x.mean(0).square().sum() / x.square().mean(0).sum())


class Watcher:
    """Hooks on the linear layers of a model, by the last part of their names.

    Args:
        model: a causal language model of transformers, without its head.
        outlier: factor of the first input channel; its weights are divided by it.
    """

    def __init__(self, model: nn.Module, outlier: float) -> None:
        self.tallies: Tallies = defaultdict(list)
        self.shares: dict[str, list[float]] = defaultdict(list)
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and not name.endswith("lm_head"):
                layer.register_forward_hook(partial(self._seen, name.rpartition(".")[2], outlier))

    def _seen(self, kind: str, outlier: float, layer: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        x, w = inputs[0].detach().flatten(0, -2).clone(), layer.weight.detach().clone()
        x[:, 0] *= outlier
        w[:, 0] /= outlier
        x8, w8 = codes(x, E4M3), codes(w, E4M3)
        compare(self.tallies, kind, "output", x8, w8)
        if kind == "v_proj":
            value = output.detach().flatten(0, -2)
            self.shares["energy of values in their mean"].append(mean_share(value))
            self.shares["norm of the first value"].append(float(value[0].norm() / value[1:].norm(dim=1).mean()))

        def graded(grad: Tensor) -> None:
            g = grad.flatten(0, -2)
            g8 = codes(g, E5M2)
            compare(self.tallies, kind, "grad_input", g8, w8.t())
            compare(self.tallies, kind, "grad_weight", g8.t(), x8.t())
            if kind == "o_proj":
                self.shares["energy of attention's gradient in its mean"].append(mean_share(g @ layer.weight.detach()))

        output.register_hook(graded)


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and append the results."""
    parser = Parser(description=__doc__)
    parser.add_argument("folder", type=path)
    parser.add_argument("text", type=path)
    parser.add_argument("--tokens", type=count(128), default=2048)
    parser.add_argument("--outlier", type=float, default=1.0)
    rows.add_flags(parser, "accumulation.csv")
    options = parser.parse_args(argv)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True)
    tokens = tokenizer(Path(options.text).read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, : options.tokens]
    if tokens.shape[1] < options.tokens:
        parser.error(f"{options.text} has {tokens.shape[1]} tokens; --tokens {options.tokens} requires more: give a longer text")
    watcher = Watcher(model, options.outlier)
    found: Any = model(tokens, labels=tokens, output_attentions=True)
    watcher.shares["weight of the first token"] = [float(layer.detach()[..., 1:, 0].mean()) for layer in found.attentions]
    found.loss.backward()
    where = rows.machine(options.commit) | {"model": Path(options.folder).name, "tokens": options.tokens, "outlier": options.outlier}
    for (kind, name, terms, accumulation), tally in sorted(watcher.tallies.items()):
        slope, sqnr = judge_sums(torch.stack(tally).sum(0).tolist())
        line = {
            "kind": kind,
            "product": name,
            "terms": terms,
            "accumulation": accumulation,
            "slope": f"{slope:.5f}",
            "sqnr_db": f"{sqnr:.1f}",
        }
        print(line, flush=True)
        rows.append(options.csv, [where | line])
    for name, values in watcher.shares.items():
        print(f"{name}: mean {sum(values) / len(values):.3f}, by layer {min(values):.3f} to {max(values):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
