"""Graphs of a step of generation: which are captured, replayed and dropped. On a CPU `recorded.Recorded` stands for them."""

import copy
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import hf_models, recorded, tiny
from megatron.lm.build import build_training
from megatron.lm.config.sections.precision import build_recipe
from megatron.lm.evaluation import decoding, decoding_graph
from megatron.lm.evaluation.decoding import Decoder
from megatron.lm.evaluation.decoding_graph import WARM_UP, Captured, CudaDevice, DecodingGraphs, obstacle
from megatron.lm.evaluation.generation import Sampling, generate
from megatron.lm.model.gpt import GPT, build_model
from megatron.lm.processes import process_groups
from megatron.lm.step import train_step

WIDE = {"hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 4, "num_query_groups": 2}
PROMPTS = [[5, 6], [1, 2, 3, 4, 5], [7, 8, 8]]
STEPS = torch.randint(tiny.VOCABULARY, (8, 3), generator=torch.Generator().manual_seed(2))


def with_graphs(model: GPT, capacity: int = 16) -> tuple[Decoder, DecodingGraphs]:
    """A decoder with graphs: the GPU's, or stand-ins where there is none."""
    decoder = Decoder(model, capacity)
    if decoder.device.type != "cuda":
        decoder._graphs = DecodingGraphs(recorded.Recorded())
    assert decoder._graphs is not None
    return decoder, decoder._graphs


def built(level: str, **settings: Any) -> GPT:
    config = hf_models.config("llama", precision=level, **settings)
    return build_model(config, build_recipe(config.precision), tiny.VOCABULARY)


def appended(decoder: Decoder, steps: int = 8, prompts: Any = PROMPTS) -> Tensor:
    """[1 + steps, b, vocabulary]."""
    first = decoder.prefill(prompts)
    return torch.stack([first] + [decoder.step(tokens[: len(prompts)].to(decoder.device)) for tokens in STEPS[:steps]])


@pytest.mark.parametrize("level", ["fp32", "bf16", "O2", "O3"])
def test_a_replayed_step_has_the_bits_of_an_eager_one(level, monkeypatch):
    monkeypatch.setattr(decoding, "SPAN", 8)
    with tiny.started(hf_models.config("llama", precision=level)):
        model = built(level)
        expected = appended(Decoder(model, 16, graph=False))
        decoder, graphs = with_graphs(model)
        monkeypatch.setattr(decoder, "_room", 16)
        assert hf_models.agree(appended(decoder), expected, 1e-5 if level == "fp32" else 2**-6), "another room, another order of sums"
        assert graphs.captures == len(graphs) == 2, "spans of 8 and of 16"
        monkeypatch.setattr(decoder, "_room", 64)
        decoder._layers[0].make_room(0, 0)
        assert torch.equal(appended(decoder), expected)
        assert torch.equal(appended(decoder), expected)
        assert graphs.captures == 4, "the cache stands elsewhere; the second batch is replayed from its first step"


def test_a_copy_captures_graphs_of_its_own():
    with tiny.started(hf_models.config("llama", precision="fp32")):
        decoder, graphs = with_graphs(built("fp32"))
        appended(decoder, 4)
        assert graphs.captures == 1
        other = copy.copy(decoder)
        other._layers = [copy.copy(layer) for layer in decoder._layers]
        for layer in other._layers:
            layer._cache = layer._cache.clone()
        expected = [decoder.step(tokens) for tokens in STEPS[4:]]
        assert all(torch.equal(other.step(tokens), logits) for tokens, logits in zip(STEPS[4:], expected, strict=True))
        assert other._graphs is not None
        assert (graphs.captures, other._graphs.captures) == (1, 1)


def weights_after_a_step(level: str, **settings: Any) -> None:
    """Generation, an optimizer's step and generation again, with graphs and by a new decoder without."""
    config = hf_models.config("llama", precision=level, train_iters=30, micro_batch_size=2, global_batch_size=2, lr=0.05, **settings)
    with tiny.started(config):
        process_groups.seed_all(config.training.seed)
        training = build_training(config, tiny.VOCABULARY)
        (model,) = [module for module in training.model.modules() if isinstance(module, GPT)]
        decoder, graphs = with_graphs(model)
        seen = [appended(decoder)]
        for number in range(3):
            text = torch.randint(tiny.VOCABULARY, (2, config.model.seq_length + 1), generator=torch.Generator().manual_seed(number))
            mask = torch.ones(text[:, 1:].shape)
            positions = torch.arange(config.model.seq_length).expand_as(mask)
            fields = {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": mask, "position_ids": positions}
            train_step(training, iter([{name: x.contiguous().to(process_groups.device()) for name, x in fields.items()}]), None)
            seen.append(appended(decoder))
            assert torch.equal(seen[-1], appended(Decoder(model, 16, graph=False)))
        # The first step has a learning rate of 0.
        assert not torch.equal(seen[1], seen[2])
        assert not torch.equal(seen[2], seen[3])
        assert graphs.captures == 1, "an optimizer writes in place, and replays read it"


@pytest.mark.parametrize("level", ["O2", *(pytest.param(level, marks=pytest.mark.nightly) for level in ("O0", "O3"))])
def test_after_a_step_of_the_optimizer_generation_has_the_new_weights(level):
    weights_after_a_step(level)


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "coat"])
def test_on_a_gpu_generation_has_the_new_weights_too(level):
    weights_after_a_step(level, **WIDE)


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "coat"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_on_a_gpu_graphs_change_no_token_and_no_bit(level, temperature):
    long = WIDE | {"seq_length": 640}
    with tiny.started(hf_models.config("llama", precision=level, **long)), warnings.catch_warnings():
        warnings.filterwarnings("error", message="generation runs without")
        model = built(level, **long)
        decoder, graphs = with_graphs(model, 640)
        prompts = [[1, 2, 3], [4] * 250, [7, 8]]
        how = {"seq_length": 640, "vocab_size": tiny.VOCABULARY}
        made = [
            generate(each, prompts, 40, Sampling(temperature=temperature), **how) for each in (Decoder(model, 640, graph=False), decoder)
        ]
        assert made[0].tokens == made[1].tokens
        assert made[0].logprobs == made[1].logprobs
        assert graphs.captures == 2, "spans of 256 and of 512"
        assert torch.equal(appended(decoder), appended(Decoder(model, 640, graph=False)))


@pytest.mark.gpu
def test_on_a_gpu_the_memory_of_the_graphs_goes_with_the_decoder():
    with tiny.started(hf_models.config("llama", precision="O3", **WIDE)):
        model = built("O3", **WIDE)
        appended(with_graphs(model)[0])  # cuBLAS keeps a workspace for the stream that captures
        gc.collect()
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        decoder, graphs = with_graphs(model)
        appended(decoder)
        assert graphs.captures == 1
        del decoder, graphs
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated() <= held[0]
        assert torch.cuda.memory_reserved() <= held[1]


def test_graphs_go_with_their_decoder():
    with tiny.started(hf_models.config("llama", precision="fp32")):
        decoder, graphs = with_graphs(built("fp32"))
        appended(decoder)
        gone = [weakref.ref(decoder), weakref.ref(graphs)]
        gc.disable()  # no cycle may keep the memory of a GPU until some later collection
        try:
            del decoder, graphs
            assert [ref() for ref in gone] == [None, None]
        finally:
            gc.enable()


def test_another_batch_or_another_place_of_a_weight_is_captured_again():
    with tiny.started(hf_models.config("llama", precision="O3")):
        model = built("O3")
        decoder, graphs = with_graphs(model)
        appended(decoder)
        assert graphs.captures == 1
        assert torch.equal(appended(decoder, prompts=PROMPTS[:2]), appended(Decoder(model, 16, graph=False), prompts=PROMPTS[:2]))
        assert graphs.captures == 2
        weight = model.decoder.layers[1].mlp.linear_fc1.weight
        norm = model.decoder.layers[0].input_layernorm.weight
        for number, change in enumerate((lambda: norm.data.mul(1.5), lambda: weight.payload.clone(), lambda: weight.scale_inv * 2)):
            value = change()
            if number == 0:
                norm.data = value
            else:
                setattr(weight, ("payload", "scale_inv")[number - 1], value)
            assert torch.equal(appended(decoder, prompts=PROMPTS[:2]), appended(Decoder(model, 16, graph=False), prompts=PROMPTS[:2]))
            assert graphs.captures == 3 + number


def test_memory_is_given_back_before_training():
    with tiny.started(hf_models.config("llama", precision="fp32")):
        decoder, graphs = with_graphs(built("fp32"))
        expected = appended(decoder)
        decoder.release()
        assert len(graphs) == 0
        assert all(layer._cache.numel() == 0 for layer in decoder._layers)
        with pytest.raises(ValueError, match=r"shape \[3\], expected \[0\]"):
            decoder.step(STEPS[0])
        assert torch.equal(appended(decoder), expected)


def test_what_cannot_be_captured_is_said_once_and_eager():
    class Refuses(recorded.Recorded):
        def capture(self, run):
            return super().capture(lambda: run() + float(run().sum()))

    with tiny.started(hf_models.config("llama", precision="fp32")):
        model = built("fp32")
        expected = appended(Decoder(model, 16, graph=False))
        decoder = Decoder(model, 16)
        decoder._graphs = DecodingGraphs(Refuses())
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert torch.equal(appended(decoder), expected)
            assert torch.equal(appended(decoder), expected)
        (said,) = [str(each.message) for each in told if "generation runs without" in str(each.message)]
        assert "slower, because a step cannot be captured: " in said
        assert "not permitted when stream is capturing; Decoder(..., graph=False) hides this warning" in said
        assert len(decoder._graphs) == decoder._graphs.captures == 0


def test_a_graph_is_made_after_its_warm_up_and_only_replayed_from_then_on():
    device, runs = recorded.Recorded(), []
    graphs, x = DecodingGraphs(device), torch.zeros(2)

    def run() -> Tensor:
        runs.append(1)
        return x + 1

    graphs.begin([x])
    kept = []
    for number in range(6):
        x.fill_(number)
        kept.append(graphs.step(256, run))
    assert [float(out[0]) for out in kept] == [1, 2, 3, 4, 5, 6], "each result stays"
    assert len(runs) == device.warm + 1 == WARM_UP + 1
    assert device.replays == 6 - WARM_UP
    graphs.begin([x])
    assert len(graphs) == 1
    graphs.begin([x[:1]])
    assert len(graphs) == 0


def test_without_triton_a_gpu_is_eager_and_says_so(monkeypatch):
    monkeypatch.setattr(decoding_graph.importlib.util, "find_spec", lambda name: None)
    assert obstacle() == "Triton is not installed"
    monkeypatch.setattr(decoding_graph.importlib.util, "find_spec", lambda name: object())
    assert obstacle() is None


def test_warm_up_and_capture_are_on_a_stream_of_their_own(monkeypatch):
    log: list[Any] = []

    class Stream:
        def __init__(self, device: Any = None) -> None:
            pass

        def wait_stream(self, other: Any) -> None:
            log.append("wait")

    class Graph:
        def replay(self) -> None:
            log.append("replay")

    class Block:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            log.append(sorted(kwargs))

        def __enter__(self) -> None: ...

        def __exit__(self, *_: Any) -> None: ...

    stand_ins = {"Stream": Stream, "graph_pool_handle": object, "CUDAGraph": Graph, "graph": Block, "stream": Block}
    for name, stand_in in (stand_ins | {"current_stream": Stream}).items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: log.append("recorded"))
    monkeypatch.setattr(decoding_graph, "_stream", Stream)
    device = CudaDevice(torch.device("cuda"))
    device.warm_up(lambda: torch.ones(1))
    assert log == ["wait", [], "wait", "recorded"]
    captured = device.capture(lambda: torch.ones(1))
    captured.replay()
    assert isinstance(captured, Captured)
    assert log[4:] == [["capture_error_mode", "pool", "stream"], "replay"]
