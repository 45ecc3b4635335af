"""Checkpoints: damaged by a disk, and forged by somebody who seals them again; read by the tools and by a run that resumes."""

import json
import pickle
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from attack import odd
from attack.fuzz import CANARY, Command

from helpers import checkpoints, tiny
from megatron.lm import pretrain
from megatron.lm.checkpoint.files.folder import INFO_FILE, read_info
from megatron.lm.checkpoint.files.index import PLAN_FILE
from megatron.lm.config.cli import config_from_dict, to_argv
from megatron.lm.tools import convert_checkpoint

OLD = Path(__file__).parents[1] / "checkpoints_of" / "version_5"
NEW = {"O2": {"opt_level": "O2"}, "O3": {"opt_level": "O3"}, "bf16": {"precision": "bf16"}, "fp16": {"precision": "fp16-amp"}}


def prepare(material: Path, levels: Sequence[str] = tuple(NEW)) -> None:
    """Checkpoints of several levels as they are written today, and those of an earlier version."""
    prefix = tiny.write_data(material)
    for name, settings in ((name, NEW[name]) for name in levels):
        checkpoints.saved(prefix, material / "saves" / name, **settings)
    for archive in sorted(OLD.glob("*.tar.xz")):
        shutil.unpack_archive(archive, material / "saves" / f"old {archive.name.partition('.')[0]}")


def case(draw: random.Random, material: Path, box: Path) -> list[Command]:
    """One checkpoint that is not as it was written, and commands that read it."""
    source = draw.choice(sorted((material / "saves").iterdir()))
    root = box / "save"
    shutil.copytree(source, root)
    folder = draw.choice(sorted(path for path in root.rglob("iter_*") if path.is_dir()))
    argv = _resume(folder, material)
    draw.choices((_damage, _forge_info, _forge_plan, _forge_tensors, _forge_pickle), (20, 30, 20, 20, 10))[0](draw, folder)
    if draw.random() < 0.05:
        marker = folder.parent / checkpoints.MARKER
        marker.write_bytes(odd.damaged(marker.read_bytes(), draw) if draw.random() < 0.5 else str(draw.choice(odd.INTEGERS)).encode())
    load = ["--load", str(folder.parent.relative_to(box))]
    commands = {
        "inspect": Command("inspect", convert_checkpoint.main, ["inspect", *load]),
        "to-hf": Command("to-hf", convert_checkpoint.main, ["to-hf", *load, "--output", "o/hf"]),
        "export-bf16": Command("export-bf16", convert_checkpoint.main, ["export-bf16", *load, "--output", "o/plain"]),
        "resume": Command("pretrain", pretrain.main, [*argv, *load], caches=("cache",)),
    }
    return [commands[name] for name in draw.sample(list(commands), 2)]


def _resume(folder: Path, material: Path) -> list[str]:
    """The flags of the run that was saved, for one step more."""
    info = read_info(folder)
    argv = to_argv(config_from_dict(info["config"]))
    for name, given in (
        ("--data-path", str(material / "corpus")),
        ("--train-iters", str(info["iteration"] + 1)),
        ("--save", None),
        ("--metrics-file", None),
        ("--load", None),
    ):
        if name in argv:
            at = argv.index(name)
            del argv[at : at + 2]
        argv += [name, given] if given is not None else []
    return [*argv, "--data-cache-path", "cache", "--override-opt-param-scheduler"]


def _damage(draw: random.Random, folder: Path) -> None:
    for file in draw.sample(sorted(folder.iterdir()), draw.choice((1, 1, 2))):
        what = draw.randrange(5)
        if what == 0:
            file.unlink()
        elif what == 1:
            file.rename(folder / draw.choice(("other", "a\x01b", f"{file.name}.bak")))
        elif what == 2:
            file.unlink()
            file.symlink_to("../../../canary/secret.distcp")
        else:
            file.write_bytes(odd.damaged(file.read_bytes(), draw))
    if draw.random() < 0.5 and (folder / INFO_FILE).is_file() and not (folder / INFO_FILE).is_symlink():
        _sealed(folder)


def _sealed(folder: Path, info: dict[str, Any] | None = None) -> None:
    """Sealed anew, where what is there can be sealed."""
    try:
        checkpoints.seal(folder, info)
    except (ValueError, KeyError, TypeError, AttributeError, OSError):  # damage of checkpoint.json itself
        return


def _forge_info(draw: random.Random, folder: Path) -> None:
    info = json.loads((folder / INFO_FILE).read_text())
    files = info.pop("files")
    if draw.random() < 0.5:
        section = draw.choice(sorted(key for key, content in info.items() if isinstance(content, dict)) or [None])
        info = info | {section: odd.twisted(info[section], draw)} if section else odd.twisted(info, draw)
    else:
        info = odd.twisted(info, draw, draw.choice((1, 1, 3)))
    if not isinstance(info, dict):
        info = {"everything": info}
    _write_info(folder, info | {"files": odd.twisted(files, draw) if draw.random() < 0.2 else files})


def _write_info(folder: Path, info: dict[str, Any]) -> None:
    from megatron.lm.checkpoint.files.folder import write_info

    info.pop("seal", None)
    try:
        write_info(folder, info)
    except (ValueError, TypeError):
        (folder / INFO_FILE).write_text(json.dumps(info))


def _forge_plan(draw: random.Random, folder: Path) -> None:
    """Twist the plan, and damage the data files."""
    for file in folder.iterdir():
        if file.name == INFO_FILE:
            continue
        data = file.read_bytes()
        try:
            content = json.loads(data)
        except ValueError:
            file.write_bytes(odd.damaged(data, draw))
        else:
            file.write_text(json.dumps(odd.twisted(content, draw, draw.choice((1, 1, 3)))))
    _sealed(folder)


CHANGES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: torch.full_like(x, torch.nan),
    lambda x: torch.full_like(x, torch.inf),
    lambda x: torch.full_like(x, -1.0),
    lambda x: torch.zeros_like(x),
    lambda x: x * 2.0**100,
    lambda x: x.double(),
    lambda x: x.reshape(-1),
    lambda x: x.reshape(-1)[: x.numel() // 2].clone(),
    lambda x: torch.cat([x.reshape(-1)] * 2),
    lambda x: torch.full_like(x, torch.finfo(x.dtype).max / 2),
    lambda x: x.reshape(-1)[:1].sum(),
    lambda x: x.unsqueeze(0),
    lambda x: x.unsqueeze(-1),
    lambda x: x.reshape(-1)[:0].clone(),
    lambda x: x.float(),
    lambda x: x.bfloat16(),
    lambda x: x.long(),
]


def _forge_tensors(draw: random.Random, folder: Path) -> None:
    """Other tensors under sound digests."""
    held = checkpoints.tensors(folder)
    keys, changed, without = sorted(held), {}, []
    for key in draw.sample(keys, draw.choice((1, 1, 2, 5))):
        what, x = draw.randrange(6), held[key]
        if what == 0:
            without.append(key)
        elif what == 1:
            changed[key] = held[draw.choice(keys)]
        elif x.is_floating_point() and x.dtype.itemsize > 1:
            changed[key] = draw.choice(CHANGES)(x)
        else:
            changed[key] = (
                torch.randint(0, 256, (x.numel() * x.itemsize,), dtype=torch.uint8).view(x.dtype).reshape(x.shape) if x.numel() else x
            )
    checkpoints.rewrite(folder, changed, without)


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return __import__, (CANARY,)


def evil_pickles() -> list[bytes]:
    """Pickles that run, open or import something where they are trusted."""
    glob = f"c{CANARY}\ntouch\n".encode()
    return [
        pickle.dumps(_Runs()),
        glob + b"(tR.",
        f"(i{CANARY}\ntouch\n.".encode(),
        b"(" + glob + b"o.",
        b"cos\nsystem\n(S'true'\ntR.",
        b"cpathlib\nPosixPath\n}S'__truediv__'\n" + glob + b"sb.",
        b"cpathlib\nPosixPath\n(S'../../canary/secret.distcp'\ntR.",
        b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n}S'_value2member_map_'\n}sb.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}S'state_dict_metadata'\n" + glob + b"(tRsb.",
        b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00(" * 1000 + b".",
        b"(" * 100000,
        b"]" + b"q\x00" + b"h\x00a" * 1000 + b".",
        b"I1\n" + b"0" * 10 + b".",
        b"\x80\x05\x8d" + (2**40).to_bytes(8, "little"),
        b"B\xff\xff\xff\x7f",
        b"\x82\x01.",
        b"Pcanary\n.",
    ]


def _forge_pickle(draw: random.Random, folder: Path) -> None:
    evil = draw.choice(evil_pickles())
    for file in (folder / ".metadata", folder / PLAN_FILE, *(path for path in folder.glob("*.bin") if draw.random() < 0.2)):
        file.write_bytes(evil)
    if draw.random() < 0.7:
        info = json.loads((folder / INFO_FILE).read_text())
        info["version"] = draw.choice((3, 4, info["version"]))
        _sealed(folder, info)
    else:
        _sealed(folder)
