"""Configurations of Hugging Face, datasets, tokenizers, text and metrics files: damaged, twisted and forged."""

import json
import random
import shutil
from pathlib import Path

from attack import odd
from attack.fuzz import CANARY, Command

from helpers import hf_models, post_runs, tiny
from megatron.lm import pretrain
from megatron.lm.hugging_face.folder import MODEL, write_json, write_tensors
from megatron.lm.tools import convert_checkpoint, evaluate, inspect_scales, loss_compare, preprocess_data, report
from megatron.lm.tools.prepare_text import train_bpe

TRAINER = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 60 --tokenizer-type NullTokenizer "
    "--data-path corpus --micro-batch-size 2 --train-iters 1 --lr 1e-3 --eval-iters 1 --split 80,15,5 --log-interval 1 "
    "--fp8-min-gain 0 --lr-warmup-iters 0"
)
DOCUMENTS = ["1 2 3 4 5", "7 8", "9 10 11 12 13 14 15 16 17 18"] * 5


def prepare(material: Path) -> None:
    """A sound file of every kind, and a checkpoint."""
    tiny.write_data(material)
    metrics, precision = material / "metrics.jsonl", material / "precision.jsonl"
    recorded = {"record_precision": str(precision), "record_interval": 1}
    tiny.run(
        tiny.config(
            material / "corpus", opt_level="O2", train_iters=3, save=str(material / "checkpoint"), metrics_file=str(metrics), **recorded
        )
    )
    (material / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS), encoding="utf-8")
    (material / "text.txt").write_text("\n<|endoftext|>\n".join(DOCUMENTS) + "\n", encoding="utf-8")
    (material / "meta.json").write_text('{"unigram_entropy_nats": 3.5}', encoding="utf-8")
    train_bpe(material, DOCUMENTS, 300)
    post_runs.toy(material / "toy")
    for name in hf_models.MODELS:
        settings = hf_models.config(name)
        about, tensors = hf_models.to_hf(settings, tiny.VOCABULARY, hf_models.random_weights(settings))
        folder = material / ("hf" if name == "llama" else f"hf of {name}")
        folder.mkdir()
        write_tensors(folder, tensors.items())
        write_json(folder / "config.json", about)


def case(draw: random.Random, material: Path, box: Path) -> list[Command]:
    """A file that is not as it should be, and the commands that read it."""
    kinds = {_configuration: 40, _weights: 15, _evaluated: 20, _dataset: 15, _tokenizer: 10, _text: 10, _log: 15}
    return draw.choices(list(kinds), list(kinds.values()))[0](draw, material, box)


def _copied(box: Path, *names: Path) -> None:
    for name in names:
        (shutil.copytree if name.is_dir() else shutil.copyfile)(name, box / name.name)


def _import(folder: Path, box: Path, *more: str) -> list[Command]:
    flags = ["--load", str(folder.relative_to(box)), "--output", "o/ours", "--make-vocab-size-divisible-by", "32", *more]
    return [Command("from-hf", convert_checkpoint.main, ["from-hf", *flags])]


def _model(draw: random.Random, material: Path, box: Path) -> Path:
    folder = draw.choice(sorted(material.glob("hf*")))
    _copied(box, folder)
    # What a reader that trusts would run.
    (box / folder.name / f"{CANARY}.py").write_text("raise SystemExit(9)\n")
    (box / folder.name / "pytorch_model.bin").write_bytes(f"c{CANARY}\ntouch\n(tR.".encode())
    return box / folder.name


def _configuration(draw: random.Random, material: Path, box: Path) -> list[Command]:
    folder = _model(draw, material, box)
    about = json.loads((folder / "config.json").read_text())
    if draw.random() < 0.2:
        about |= {"auto_map": {"AutoModel": f"{CANARY}.touch"}, "trust_remote_code": True}
    known = [*about, "rope_scaling", "rope_parameters", "quantization_config", "head_dim", "num_key_value_heads"]
    for _ in range(draw.choice((1, 1, 2, 3))):
        about[draw.choice(known)] = odd.value(draw)
    text = json.dumps(odd.twisted(about, draw) if draw.random() < 0.3 else about)
    (folder / "config.json").write_bytes(odd.damaged(text.encode(), draw) if draw.random() < 0.1 else text.encode())
    return _import(folder, box)


def _weights(draw: random.Random, material: Path, box: Path) -> list[Command]:
    folder = _model(draw, material, box)
    file = folder / MODEL
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    what = draw.randrange(3)
    if what == 0:
        file.write_bytes(odd.damaged(data, draw))
    elif what == 1:
        new = json.dumps(odd.twisted(header, draw, draw.choice((1, 2)))).encode("utf-8", "surrogatepass")
        file.write_bytes(len(new).to_bytes(8, "little") + new + data[8 + size :])
    else:
        shard = draw.choice(("../canary/secret.safetensors", "/etc/passwd", "x.safetensors", "model.safetensors", "..", "a.bin", ""))
        index = {"weight_map": {name: shard for name in header if name != "__metadata__"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(odd.twisted(index, draw) if draw.random() < 0.5 else index))
    return _import(folder, box)


def _evaluated(draw: random.Random, material: Path, box: Path) -> list[Command]:
    """A folder that transformers reads."""
    _copied(box, material / "toy", material / "text.txt")
    folder = box / "toy"
    (folder / f"{CANARY}.py").write_text("raise SystemExit(9)\n")
    (folder / "pytorch_model.bin").write_bytes(f"c{CANARY}\ntouch\n(tR.".encode())
    names = ("config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json", MODEL)
    file = folder / draw.choices(names, (4, 2, 2, 1, 1))[0]
    if file.suffix == ".json" and draw.random() < 0.9:
        content = json.loads(file.read_text())
        if draw.random() < 0.2:
            classes = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"), f"{CANARY}.touch")
            content |= {"auto_map": classes, "model_type": draw.choice(("llama", "new")), "trust_remote_code": True}
        for _ in range(draw.choice((1, 1, 2))):
            content[draw.choice(list(content))] = odd.value(draw)
        file.write_text(json.dumps(odd.twisted(content, draw) if draw.random() < 0.5 else content))
    else:
        file.write_bytes(odd.damaged(file.read_bytes(), draw))
    return [Command("evaluate", evaluate.main, ["toy", "--text", "text.txt", "--output", "o/results.json"])]


def _dataset(draw: random.Random, material: Path, box: Path) -> list[Command]:
    _copied(box, *material.glob("corpus.*"))
    suffix = draw.choice(("bin", "idx", "json"))
    file = box / f"corpus.{suffix}"
    if suffix == "json" and draw.random() < 0.7:
        file.write_text(json.dumps(odd.twisted(json.loads(file.read_text()), draw)))
    elif draw.random() < 0.1:
        file.unlink()
    else:
        file.write_bytes(odd.damaged(file.read_bytes(), draw))
    commands = [Command("pretrain", pretrain.main, TRAINER.split(), caches=("index_cache",))]
    if draw.random() < 0.5:  # and again, over the caches that the first has left, which are damaged too
        return [*commands, Command("damage", lambda _: _damage_caches(draw, box), []), *commands]
    return commands


def _damage_caches(draw: random.Random, box: Path) -> int:
    made = sorted(path for path in box.rglob("*") if path.is_file() and path.parent != box)
    for file in draw.sample(made, min(len(made), draw.choice((1, 3)))):
        evil = (
            b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(128)
            + f"c{CANARY}\ntouch\n(tR.".encode()
        )
        file.write_bytes(evil if file.suffix == ".npy" and draw.random() < 0.3 else odd.damaged(file.read_bytes(), draw))
    return 0


def _tokenizer(draw: random.Random, material: Path, box: Path) -> list[Command]:
    _copied(box, material / "tokenizer.json", material / "text.txt", material / "hf")
    file = box / "tokenizer.json"
    if draw.random() < 0.3:
        file.write_bytes(odd.damaged(file.read_bytes(), draw))
    else:
        content = json.loads(file.read_text())
        part = draw.choice((None, None, "model", "pre_tokenizer", "decoder", "added_tokens"))
        content = odd.twisted(content, draw) if part is None else content | {part: odd.twisted(content[part], draw)}
        file.write_text(json.dumps(content))
    flags = "--input text.txt --output-prefix o/data --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json --workers 0"
    return [
        Command("preprocess_data", preprocess_data.main, flags.split()),
        *_import(box / "hf", box, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "tokenizer.json"),
    ]


def _text(draw: random.Random, material: Path, box: Path) -> list[Command]:
    lines = [json.dumps({"text": text}) for text in DOCUMENTS]
    for _ in range(draw.choice((1, 3))):
        lines[draw.randrange(len(lines))] = json.dumps(
            draw.choice((odd.value(draw), {"text": odd.value(draw)}, {"text": str(draw.choice(odd.INTEGERS))}))
        )
    text = "\n".join(lines).encode("utf-8", "surrogatepass")
    suffix = draw.choice(("jsonl", "json", "txt"))
    (box / f"text.{suffix}").write_bytes(odd.damaged(text, draw) if draw.random() < 0.3 else text)
    (box / "tokenizer.json").symlink_to(material / "tokenizer.json")
    kind = draw.choice(
        ("NullTokenizer --vocab-size 60", "NullTokenizer --vocab-size 4000000000", "HuggingFaceTokenizer --tokenizer-model tokenizer.json")
    )
    flags = f"--input text.{suffix} --output-prefix o/data --workers 0 --tokenizer-type {kind}"
    return [Command("preprocess_data", preprocess_data.main, flags.split())]


def _log(draw: random.Random, material: Path, box: Path) -> list[Command]:
    names = ("metrics.jsonl", "precision.jsonl", "meta.json")
    for name in names:
        lines = (material / name).read_text().splitlines()
        for _ in range(draw.choice((0, 1, 2))):
            at = draw.randrange(len(lines))
            lines[at] = json.dumps(odd.twisted(json.loads(lines[at]), draw)) if lines[at].startswith("{") else lines[at]
        text = ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")
        (box / name).write_bytes(odd.damaged(text, draw) if draw.random() < 0.1 else text)
    commands = [
        Command("loss_compare", loss_compare.main, ["a=metrics.jsonl", "b=metrics.jsonl", "--max-rel", "0.1"]),
        Command("inspect_scales", inspect_scales.main, ["precision.jsonl"]),
    ]
    if draw.random() < 0.15:  # pictures take seconds
        commands.append(
            Command(
                "report",
                report.main,
                ["a=metrics.jsonl", "--meta", "meta.json", "--out", "o/r"],
            )
        )
    return commands
