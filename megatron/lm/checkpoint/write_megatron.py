"""Write one of our checkpoints in Megatron-LM's format, in one process."""

from collections.abc import Iterator
from pathlib import Path

from megatron.lm.checkpoint.files.folder import iteration_folder
from megatron.lm.checkpoint.files.storage import Item
from megatron.lm.checkpoint.foreign import write_torch_dist
from megatron.lm.checkpoint.megatron_content import MOMENTS, common, extra_states, megatron_items
from megatron.lm.checkpoint.reader import CheckpointReader
from megatron.lm.config import LATEST_CHECKPOINT_FILE
from msamp.optim.updates import MASTER


def write_megatron(saved: CheckpointReader, root: Path, *, states: bool = True) -> Path:
    """Write the checkpoint and its marker file under `root`, and return its folder.

    Args:
        saved: of any grid and precision.
        root: an empty folder.
        states: also write the optimizer's states, as FP32 masters and moments, if the optimizer is AdamW.

    Raises:
        ValueError: if a tensor of the checkpoint is damaged, or Megatron-LM's format does not have the model's parts.
        OSError, RuntimeError: if the folder cannot be written.
    """
    model = saved.config.model
    if model.num_experts is not None or model.qk_layernorm_scope != "head":
        part = f"--num-experts {model.num_experts}" if model.num_experts is not None else f"--qk-layernorm-scope {model.qk_layernorm_scope}"
        raise ValueError(f"to-megatron does not support a model with {part} yet: use to-hf, or export-bf16")
    names, layers = saved.names(), model.num_layers
    steps = [saved.step(name) for name in names] if states else []
    whole = bool(steps) and all(step is not None for step in steps) and _has_moments(saved, names)
    step = max((step for step in steps if step is not None), default=None) if whole else None
    folder = iteration_folder(root, saved.info["iteration"])
    folder.mkdir()
    items = list(megatron_items(list(_items(saved, names, step is not None)), (), (), layers))
    write_torch_dist.write(folder, items, common(saved.info, step), extra_states(layers), None)
    (root / LATEST_CHECKPOINT_FILE).write_text(str(saved.info["iteration"]), encoding="utf-8")
    return folder


def _has_moments(saved: CheckpointReader, names: list[str]) -> bool:
    return all(f"{key}/{name}" in saved.stored.tensors for name in names for key in MOMENTS)


def _items(saved: CheckpointReader, names: list[str], with_states: bool) -> Iterator[Item]:
    for name in names:
        scaled = bool(saved.format(name)[2])
        yield Item.whole(f"model/{name}", saved.values(name).bfloat16() if scaled else saved.weight(name))
        if with_states:
            yield Item.whole(f"{MASTER.key}/{name}", saved.values(name))
            for key in MOMENTS:
                if (state := saved.state(key, name)) is not None:
                    yield Item.whole(f"{key}/{name}", state)
