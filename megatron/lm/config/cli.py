"""Command line of the trainer: generate flags from the sections of `Config`, parse them, and convert a `Config` back to flags.

`--preset NAME` sets the defaults to the values of `presets.py`; other flags override them. Flags whose name or meaning differs in
Megatron-LM first go through the table of `megatron_flags`.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, fields
from types import NoneType, UnionType
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from megatron.lm.config.blend_file import read_blend, read_blend_per_split
from megatron.lm.config.from_checkpoint import Saved, taken
from megatron.lm.config.megatron_flags.apply import apply, described, given_by
from megatron.lm.config.megatron_flags.table import GivenFlags, closest, defaults, help_sections
from megatron.lm.config.presets import PRESETS, in_other_units, preset, published_vocabulary
from megatron.lm.config.sections.outputs import CheckpointConfig
from megatron.lm.config.sections.schema import COUNT, COUNT_OR_ZERO, NON_NEGATIVE, POSITIVE, SIZE, choices_of, flag
from megatron.lm.config.whole import Config
from megatron.lm.errors import report

S = TypeVar("S")


def section_types() -> dict[str, type]:
    """Return the dataclass of each field of `Config`, by name."""
    return dict(_hints(Config))


@functools.cache
def _hints(section: type) -> Mapping[str, Any]:
    """Return the types of a dataclass's fields, cached because the lookup dominated the time to parse flags."""
    return get_type_hints(section)


@dataclass(frozen=True)
class Parsed:
    """A parsed command line.

    Attributes:
        config: its settings.
        lines: log lines about flags of Megatron-LM that were translated or dropped.
    """

    config: Config
    lines: tuple[str, ...]


def parse_args(argv: Sequence[str] | None = None) -> Config:
    """Return the settings of `parse`."""
    return parse(argv).config


def parse(argv: Sequence[str] | None = None, saved: Callable[[CheckpointConfig], Saved | None] | None = None) -> Parsed:
    """Parse flags (default: the process's). A usage error exits with code 2 and a message on stderr.

    Values are only parsed here; `check.check` validates them.

    Args:
        argv: the words of the command line.
        saved: returns the settings of the checkpoint to load, or None if there is none. `--use-checkpoint-args` needs it and is otherwise
            refused.

    Raises:
        ValueError: from `saved`, for an unreadable checkpoint.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    chosen = _preset_parser(add_help=False).parse_known_args(argv)[0].preset
    settings = in_other_units(preset(chosen), given_by(argv).flags) if chosen else {}
    given = given_by(argv, settings)
    differing, megatron_defaults = [default for default in defaults() if default.applies(given)], "--megatron-defaults" in given.flags
    if megatron_defaults:
        settings = {name: value for default in differing for name, value in default.settings.items()} | settings
    if (paper := given.value("--as-published")) is not None:
        from msamp.numerics.recipe import PAPERS, as_published  # torch

        if (recipe := as_published(paper) if paper in PAPERS else None) is not None:  # `check` refuses an unknown paper
            settings = settings | {"grad_exchange": recipe.exchange, "mu_rule": recipe.mu_rule}
    about = _about_loading(given)
    from_checkpoint = taken(about, saved(about)) if saved is not None and about.use_checkpoint_args and about.load is not None else None
    if from_checkpoint is not None:
        settings = settings | dict(from_checkpoint.settings)
    parser = _parser(settings)
    if about.use_checkpoint_args and saved is None:
        parser.error("--use-checkpoint-args works only in training, which reads a checkpoint: give the flags of the model")
    try:
        applied = apply(argv, _options(parser), settings)
    except ValueError as error:
        parser.error(str(error))
    argv = list(applied.argv)
    values, lines = vars(parser.parse_args(argv)), list(applied.lines)
    if from_checkpoint is not None:
        lines += filter(None, (from_checkpoint.line, from_checkpoint.override(values, frozenset(given.flags))))
    in_checkpoint = from_checkpoint is not None and "vocab_size" in from_checkpoint.settings
    if megatron_defaults and values["tokenizer_type"] == "NullTokenizer" and values["vocab_size"] is not None and not in_checkpoint:
        values["vocab_size"] += 1  # Megatron-LM's V counts the tokens before the end of document, whose id is V
    try:
        _read_blends(values)
    except ValueError as error:
        parser.error(str(error))
    if chosen and values["dry_run"] and values["vocab_size"] is None and values["tokenizer_type"] is None:
        values["vocab_size"] = published_vocabulary(chosen)  # a dry run has no tokenizer to determine it
    config = config_from_dict(
        {name: {f.name: values[f.name] for f in fields(cls) if f.name in values} for name, cls in section_types().items()}
    )
    return Parsed(config, tuple(lines) if megatron_defaults or not differing else (*lines, described(differing)))


def _read_blends(values: dict[str, Any]) -> None:
    """Replace the files of `--data-args-path` and `--per-split-data-args-path` by the equivalent flags.

    Raises:
        ValueError: a file that cannot be read, or one in addition to such a flag.
    """
    shared, per_split = values["data_args_path"], values["per_split_data_args_path"]
    if shared is not None and values["data_path"]:
        raise ValueError("--data-path and --data-args-path contradict each other: give one of them")
    if per_split is not None:
        others = ["data_args_path"] if shared is not None else []
        others += [name for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path") if values[name]]
        if others:
            given = " and ".join(map(flag, others))
            raise ValueError(f"{given} and --per-split-data-args-path contradict each other: give one of them")
        values |= {f"{split}_data_path": words for split, words in read_blend_per_split(per_split).items()}
    if shared is not None:
        values["data_path"] = read_blend(shared)


def _about_loading(given: GivenFlags) -> CheckpointConfig:
    """Parse the flags about the checkpoint to load and `--use-checkpoint-args` before all others."""
    switches: dict[str, Any] = {f.name: flag(f.name) in given.flags for f in fields(CheckpointConfig) if f.default is False}
    return CheckpointConfig(
        load=given.value("--load"),
        save=given.value("--save"),
        ckpt_step=given.count("--ckpt-step"),
        non_persistent_save_interval=given.count("--non-persistent-save-interval"),
        non_persistent_global_ckpt_dir=given.value("--non-persistent-global-ckpt-dir"),
        **switches,
    )


def _options(parser: argparse.ArgumentParser) -> frozenset[str]:
    return frozenset(option for action in parser._actions for option in action.option_strings)


def to_argv(config: Config) -> list[str]:
    """Convert `config` to flags: the required ones and those that differ from their default; `parse_args(to_argv(c)) == c`."""
    argv: list[str] = []
    for section in section_types():
        settings = getattr(config, section)
        for setting in fields(settings):
            value = getattr(settings, setting.name)
            if value == setting.default:
                continue
            if value is False:
                argv.append(flag(f"no_{setting.name}"))
                continue
            argv.append(flag(setting.name))
            if isinstance(value, tuple):
                argv.extend(map(str, value))
            elif value is not True:
                argv.append(str(value))
    return argv


def config_to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Convert to {section: {field: value}}, JSON-serializable (tuples become lists)."""
    return {section: {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()} for section, values in asdict(config).items()}


def settings_by_name(config: Config) -> dict[str, Any]:
    """Return all settings as `config_to_dict`, without sections: names are unique."""
    return {name: value for section in config_to_dict(config).values() for name, value in section.items()}


def config_from_dict(data: Mapping[str, Mapping[str, Any]]) -> Config:
    """Invert `config_to_dict`; omitted settings have their defaults.

    Raises a ValueError with the section or setting that is unknown, missing although required, or of the wrong type.
    """
    sections = section_types()
    _refuse_unknown_keys(data, sections, "section of the configuration")
    return Config(**{name: section_from_dict(cls, name, data.get(name, {})) for name, cls in sections.items()})  # type: ignore[arg-type]


def section_from_dict(cls: type[S], name: str, values: Mapping[str, Any]) -> S:
    """Return the section `name` of a configuration from its settings; errors as `config_from_dict`."""
    hints = _hints(cls)  # type: ignore[arg-type]
    _refuse_unknown_keys(values, hints, f"setting of the section {name!r}")
    missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in values]  # type: ignore[arg-type]
    if missing:
        raise ValueError(f"the section {name!r} is missing the required {', '.join(missing)}: add them")
    return cls(**{key: _typed(f"{name}.{key}", hints[key], value) for key, value in values.items()})


def _typed(name: str, hint: Any, value: Any) -> Any:
    kind, optional, many = _kind(hint)
    if value is None and optional:
        return None
    if many and isinstance(value, list | tuple) and all(isinstance(item, kind) for item in value):
        return tuple(value)
    if not many and type(value) is kind:
        return value
    if kind is float and type(value) is int:
        return float(value)
    expected = ("a list of " if many else "") + kind.__name__ + (" or null" if optional else "")
    raise ValueError(f"{name} is {value!r}, expected {expected}")


def _refuse_unknown_keys(data: Mapping[str, Any], known: Mapping[str, Any], what: str) -> None:
    for key in data:
        if key not in known:
            close = closest(key, known)
            raise ValueError(f"{key!r} is not a known {what}{f' (did you mean {close}?)' if close else ''}; known: {', '.join(known)}")


def _kind(hint: Any) -> tuple[type, bool, bool]:
    """Split a type hint into (scalar type, whether it may be None, whether it is a tuple of scalars)."""
    optional = isinstance(hint, UnionType)
    if optional:
        hint = next(arg for arg in get_args(hint) if arg is not NoneType)
    many = get_origin(hint) is tuple
    return (get_args(hint)[0] if many else hint), optional, many


class _Parser(argparse.ArgumentParser):
    """Argument parser whose errors omit the usage text, which would fill two screens."""

    def error(self, message: str) -> NoReturn:
        report(f"{self.prog}: error: {message} ({self.prog} --help lists the flags)", message)
        self.exit(2)

    def format_help(self) -> str:
        for action in self._actions:
            if isinstance(action, _Registered):
                action.metavar = f"{{{','.join(action.names())}}}"
        return f"{super().format_help()}\n{help_sections()}"


class _Registered(argparse.Action):
    """Accept a name that can be registered. `check` validates it; only the help lists the names here, because that imports torch."""

    def __init__(self, *args: Any, names: Callable[[], Sequence[str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.names = names

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, values)


def _preset_parser(**kwargs: Any) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="msamp pretrain",
        usage="%(prog)s [--preset NAME] [flags]",
        description="Pre-train a GPT, with several processes under torchrun or with one without it.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=40, width=132),
        **kwargs,
    )
    parser.add_argument("--preset", choices=tuple(PRESETS), help="start from the settings of this model size; flags override them")
    parser.add_argument(
        "--megatron-defaults",
        action="store_true",
        help="use Megatron-LM's default for each absent flag; docs/reference/megatron_flags.md lists those that differ",
    )
    parser.add_argument("--data-args-path", metavar="FILE", help="file with the arguments of --data-path, a weight and a prefix per line")
    parser.add_argument(
        "--per-split-data-args-path",
        metavar="FILE",
        help='JSON with what --train-data-path, --valid-data-path and --test-data-path take: {"train": [weight, prefix, ...], ...}',
    )
    return parser


def _parser(presets: Mapping[str, Any]) -> argparse.ArgumentParser:
    """Build the parser of all flags; those in `presets` have that value as default and are not required."""
    parser = _preset_parser()
    for section, cls in section_types().items():
        group = parser.add_argument_group(section, (cls.__doc__ or "").splitlines()[0])
        for setting in fields(cls):
            _add_flag(group, setting, _hints(cls)[setting.name], presets.get(setting.name, setting.default))
    return parser


def _add_flag(group: Any, setting: Field, hint: Any, default: Any) -> None:
    kind, _, many = _kind(hint)
    text = setting.metadata["help"]
    legal = setting.metadata["legal"]
    shown = [f"in {legal}"] if legal and legal not in (COUNT, COUNT_OR_ZERO, SIZE, POSITIVE, NON_NEGATIVE) else []
    if default is MISSING:
        shown.append("required")
    elif default not in (None, ()) and kind is not bool:
        shown.append(f"default: {default}")
    options: dict[str, Any] = {"help": (f"{text} ({', '.join(shown)})" if shown else text).replace("%", "%%")}
    if kind is bool:
        # A flag that a preset turns on needs --no-X to turn it off; for all others, --no-X would only double the length of the help.
        group.add_argument(
            flag(setting.name), action=argparse.BooleanOptionalAction if default else "store_true", default=default, **options
        )
        return
    if many:
        options["nargs"] = "*"
    if default is MISSING:
        options["required"] = True
    else:
        options["default"] = default
    if callable(setting.metadata["choices"]):
        group.add_argument(flag(setting.name), action=_Registered, names=setting.metadata["choices"], **options)
        return
    choices = choices_of(setting)
    metavar = None if choices else {int: "N", float: "X", str: "TEXT"}[kind]
    group.add_argument(flag(setting.name), type=kind, choices=choices, metavar=metavar, **options)
