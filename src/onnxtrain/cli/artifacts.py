"""``onnxtrain artifacts``: what it takes to train an .onnx model."""

from __future__ import annotations

import argparse
import contextlib
import enum
import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnxtrain.errors import OptionError, close_to

_EXAMPLES = """examples:
  onnxtrain artifacts model.onnx --loss cross_entropy --optimizer adamw --out run
  onnxtrain artifacts model.onnx --loss mse --optimizer sgd --momentum 0.9 --train "head.*" --out run
  onnxtrain artifacts model.onnx --loss cross_entropy --loss-input scores --output scores --label-smoothing 0.1 \\
      --optimizer adamw --weight-decay 0.01 --no-decay "*bias" --clip-norm 1 --out run
"""
_OF_LOSS = ("reduction", "label_smoothing", "ignore_index", "axis", "beta", "blank", "zero_infinity")
_OF_OPTIMIZER = ("betas", "eps", "weight_decay", "no_decay", "formula", "momentum", "dampening", "nesterov")


def add_to(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "artifacts",
        help="write what it takes to train an .onnx model with the ordinary onnxruntime",
        description="Write training_model.onnx, eval_model.onnx, optimizer_model.onnx and checkpoint.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="the .onnx file")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the files")
    parser.add_argument("--prefix", default="", help="how the names of the files begin")
    parser.add_argument("--train", nargs="+", metavar="PATTERN", help="initializers to train; default: all")
    parser.add_argument("--freeze", nargs="+", metavar="PATTERN", help="initializers not to train")
    tied = parser.add_mutually_exclusive_group()
    tied.add_argument(
        "--tie", nargs="*", metavar="NAME", help="pairs of weights that are one; without names, all found"
    )
    tied.add_argument("--no-tie", action="store_true", help="train tables and heads apart, without a warning")
    parser.add_argument(
        "--untie", nargs="+", default=(), metavar="NAME", help="weights that each module gets for itself"
    )
    parser.add_argument("--output", nargs="+", metavar="NAME", help="values given back after the loss")
    parser.add_argument(
        "--batch-statistics", action="store_true", help="BatchNormalization takes the statistics of the batch"
    )
    parser.add_argument(
        "--memory-budget", type=budget, metavar="BYTES", help="of a step beside weights: 64MiB, 0.5 for half, or min"
    )
    parser.add_argument(
        "--worst-case", nargs="+", type=shape, metavar="INPUT=SIZES", help="shapes for the budget, such as ids=16,128"
    )
    parser.add_argument("--nominal", action="store_true", help="also write nominal_checkpoint: forms without content")
    parser.add_argument("--ort", action="store_true", help="also write .ort twins")
    parser.add_argument("--custom-op-library", metavar="FILE", help="library of the model's custom operators")
    _add_loss(parser.add_argument_group("loss"))
    _add_optimizer(parser.add_argument_group("optimizer"))
    parser.set_defaults(run=_artifacts)


def _add_loss(group: Any) -> None:
    group.add_argument(
        "--loss", metavar="NAME", help="such as cross_entropy or MSELoss; default: the model's first output"
    )
    group.add_argument("--loss-input", nargs="+", metavar="NAME", help="what the loss reads; default: the outputs")
    group.add_argument("--reduction", help="mean, sum; batchmean for kl_div")
    group.add_argument("--label-smoothing", type=float, metavar="SHARE", help="spread evenly over all classes")
    group.add_argument("--ignore-index", type=int, metavar="LABEL", help="label that does not count")
    group.add_argument("--class-axis", type=int, dest="axis", metavar="AXIS", help="of the scores; default: 1")
    group.add_argument("--beta", type=float, help="where smooth_l1 becomes straight")
    group.add_argument("--blank", type=int, metavar="CLASS", help="of ctc: stands for no label; default: 0")
    group.add_argument("--zero-infinity", action="store_true", default=None, help="of ctc: infinite losses count as 0")


def _add_optimizer(group: Any) -> None:
    group.add_argument("--optimizer", metavar="NAME", help="such as adamw or SGD; default: no optimizer model")
    group.add_argument("--weight-decay", type=float, metavar="FACTOR")
    group.add_argument("--no-decay", nargs="+", metavar="PATTERN", help="parameters that do not decay")
    group.add_argument("--betas", nargs=2, type=float, metavar="BETA", help="of the running means")
    group.add_argument("--eps", type=float, help="added to the root")
    group.add_argument("--formula", help="of adamw: huggingface or torch")
    group.add_argument("--momentum", type=float, metavar="FACTOR", help="of sgd")
    group.add_argument("--dampening", type=float, metavar="SHARE", help="of sgd's momentum")
    group.add_argument("--nesterov", action="store_true", default=None, help="sgd with Nesterov's momentum")
    group.add_argument("--clip-norm", type=float, metavar="NORM", help="largest norm of all gradients together")


def _artifacts(given: argparse.Namespace) -> int:
    from onnxtrain import artifacts
    from onnxtrain.onnxblock import loss, optim

    options = vars(given)
    of_loss = {name: options[name] for name in _OF_LOSS if options[name] is not None}
    of_optimizer = {name: options[name] for name in _OF_OPTIMIZER if options[name] is not None}
    if given.clip_norm is not None:
        of_optimizer["clip_grad"] = optim.ClipGradNorm(given.clip_norm)
    paths = artifacts.generate_artifacts(
        given.model,
        requires_grad=given.train,
        frozen_params=given.freeze,
        loss=_block("--loss", given.loss, artifacts.LossType, loss, of_loss),
        optimizer=_block("--optimizer", given.optimizer, artifacts.OptimType, optim, of_optimizer),
        artifact_directory=given.out,
        prefix=given.prefix,
        ort_format=given.ort,
        custom_op_library=given.custom_op_library,
        additional_output_names=given.output,
        nominal_checkpoint=given.nominal,
        loss_input_names=given.loss_input,
        batch_statistics=given.batch_statistics,
        tie=_pairs(given.tie, given.no_tie),
        untie=given.untie,
        memory_budget=given.memory_budget,
        worst_case=dict(given.worst_case) if given.worst_case else None,
    )
    _report(paths)
    return 0


def budget(text: str) -> int | float | str:
    """A number where it is one, a share where it has a point, else text for ``Options`` to read."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    """The name and the sizes of an input."""
    name, _, sizes = text.rpartition("=")
    if not name:
        raise ValueError(text)
    return name, tuple(map(int, sizes.split(",")))


def _pairs(names: list[str] | None, is_off: bool) -> bool | list[list[str]] | None:
    """What ``--tie`` says: pairs of names, all where none is named, None where nothing is said.

    Raises:
        OptionError: a name is left over.
    """
    if names is None:
        return False if is_off else None
    if len(names) % 2:
        raise OptionError(f"--tie has {len(names)} names, which are no pairs", cure="write --tie TABLE HEAD")
    return [names[i : i + 2] for i in range(0, len(names), 2)] or True


def _block(option: str, name: str | None, kinds: type[enum.IntEnum], classes: Any, settings: Mapping[str, Any]) -> Any:
    """The kind itself, or its class made with settings; None where no name is given.

    Raises:
        OptionError: there is no such kind, or it has no such setting.
    """
    if name is None:
        if settings:
            raise OptionError(f"{_option(next(iter(settings)))} is given without {option}", cure=f"give {option} NAME")
        return None
    known = {_plain(kind.name): kind for kind in kinds}
    if _plain(name) not in known:
        names = [kind.name for kind in kinds]
        raise OptionError(f"{option} {name} is not known{close_to(name, names)}", cure=f"choose {', '.join(names)}")
    kind = known[_plain(name)]
    if not settings:
        return kind
    made = getattr(classes, kind.name)
    takes = inspect.signature(made).parameters
    for setting, value in settings.items():
        if setting not in takes or isinstance(takes[setting].default, tuple) != isinstance(value, list):
            raise OptionError(f"{kind.name} has no {_option(setting)} of that kind", cure="leave it out")
    return made(**settings)


def _plain(name: str) -> str:
    """A name without case, underscores and the ending ``Loss``: ``cross_entropy`` is ``CrossEntropyLoss``."""
    return name.replace("_", "").replace("-", "").lower().removesuffix("loss")


def _option(setting: str) -> str:
    return {"axis": "--class-axis", "clip_grad": "--clip-norm"}.get(setting, "--" + setting.replace("_", "-"))


def _report(paths: Mapping[str, Path]) -> None:
    """Print what is trained, what is not, and the files."""
    from onnxtrain.checkpoint import read

    checkpoint = read(paths["checkpoint"])
    for title, forms in (("trained", checkpoint.trainable), ("frozen", checkpoint.frozen)):
        print(f"{title}: {len(forms)} initializers, {sum(f.size for f in forms.values()):,} elements")
        width = max((len(name) for name in forms), default=0)
        for name, form in forms.items():
            print(f"  {name:{width}}  {form.dtype} [{', '.join(map(str, form.shape))}]")
    print("files:")
    width = max(len(str(path)) for path in paths.values())
    for path in paths.values():
        print(f"  {path!s:{width}}  {_size(path.stat().st_size)}")


def _size(count: int) -> str:
    """A number of bytes with the unit that leaves up to four digits before the point."""
    power = min(int(math.log(max(count, 1), 1000)), 3)
    return f"{count} B" if not power else f"{count / 1000**power:.1f} {('kB', 'MB', 'GB')[power - 1]}"
