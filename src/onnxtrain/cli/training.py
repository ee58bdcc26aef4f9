"""``onnxtrain train`` and ``onnxtrain export``: train the artifacts in a folder, and write the trained model."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from onnxtrain.errors import OptionError

_TRAIN = """examples:
  onnxtrain train run --data digits.npz --epochs 10
  onnxtrain train run --data digits.npz --epochs 10 --lr 3e-3 --schedule cosine --warmup 50 \\
      --valid-share 0.2 --accuracy scores --save-every 100
  onnxtrain train run --data digits.npz --epochs 10 --resume

The .npz file has an array for each input of the model, by name, with a row for each sample:
  numpy.savez("digits.npz", image=images, labels=labels)

The run starts from DIR/checkpoint and writes DIR/trained_checkpoint. Killed at any moment and started again with the
same options and --resume, it ends with the same bits; Ctrl-C writes a checkpoint first.
"""
_EXPORT = """examples:
  onnxtrain export run trained.onnx
  onnxtrain export run trained.onnx --output scores features
"""
_BATCH = 32  # rows of a batch where nothing says how many
_SCHEDULES = ("linear", "cosine", "constant", "polynomial", "one_cycle")


def add_to(commands: Any) -> None:
    """Add both commands."""
    train = commands.add_parser(
        "train",
        help="train the artifacts in a folder with the ordinary onnxruntime",
        epilog=_TRAIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("folder", metavar="DIR", help="what onnxtrain artifacts wrote")
    train.add_argument("--prefix", default="", help="how the names of the artifacts begin")
    train.add_argument("--data", required=True, metavar="FILE.npz", help="arrays by input name")
    train.add_argument("--epochs", type=int, required=True, metavar="N")
    train.add_argument("--batch-size", type=int, metavar="N", help="default: 32, or what the model is made for")
    train.add_argument("--lr", type=float, default=1e-3, metavar="RATE", help="highest learning rate; default: 1e-3")
    train.add_argument("--schedule", choices=_SCHEDULES, default="constant", help="default: constant")
    train.add_argument("--warmup", type=int, default=0, metavar="STEPS", help="in which the rate rises")
    held_out = train.add_mutually_exclusive_group()
    held_out.add_argument("--valid", metavar="FILE.npz", help="data to evaluate after each epoch")
    held_out.add_argument("--valid-share", type=float, default=0.0, metavar="SHARE", help="of --data, to evaluate")
    train.add_argument("--accuracy", metavar="OUTPUT", help="output with the scores of classes")
    train.add_argument("--labels", default="labels", metavar="INPUT", help="for --accuracy; default: labels")
    train.add_argument("--save-every", type=int, metavar="STEPS", help="besides the end of each epoch")
    train.add_argument("--resume", action="store_true", help="go on where the run stands, from the start if nowhere")
    train.add_argument("--seed", type=int, default=0, help="of order, split and dropout; default: 0")
    train.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, or a provider of onnxruntime")
    train.add_argument("--json", action="store_true", help="print a line of JSON for each epoch, and one at the end")
    train.set_defaults(run=_train)
    export = commands.add_parser(
        "export",
        help="write the trained model, without loss and labels",
        epilog=_EXPORT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    export.add_argument("folder", metavar="DIR", help="what onnxtrain artifacts wrote")
    export.add_argument("model", metavar="MODEL.onnx", help="the file to write")
    export.add_argument("--prefix", default="", help="how the names of the artifacts begin")
    export.add_argument("--output", nargs="+", metavar="NAME", help="default: the outputs of the original model")
    export.add_argument("--checkpoint", metavar="FILE", help="default: trained_checkpoint, else checkpoint")
    export.set_defaults(run=_export)


class _Signals:
    """Remembers SIGINT and SIGTERM instead of dying; a second one kills as ever."""

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._remember) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _: FrameType | None) -> None:
        self.received = number
        for one, handler in self._before.items():
            signal.signal(one, handler)

    def __call__(self) -> bool:
        return bool(self.received)


def _train(given: argparse.Namespace) -> int:
    from onnxtrain.cli.reports import Bar, line

    run = _run(given)
    if not given.json:
        _announce(run)
    bar, started = Bar(run.steps), time.perf_counter()
    with _Signals() as stopped:

        def show() -> None:
            bar.step(run.position.epoch + 1, run.position.batch)

        for epoch in run.train(given.save_every, show, stopped):
            bar.close()
            now = time.perf_counter()
            print(line(epoch, given.epochs, now - started, given.json), flush=True)
            started = now
        bar.close()
    if stopped():
        at = run.position
        where = f"interrupted in epoch {at.epoch + 1} after {at.batch} of {run.steps} steps"
        print(f"onnxtrain: {where}; the same command with --resume goes on", file=sys.stderr)
        return 128 + stopped.received
    if given.json:
        print(json.dumps({"checkpoint": str(run.files.trained), "steps": run.optimizer.updates}))
    else:
        print(f"trained to step {run.optimizer.updates}: {run.files.trained}")
    return 0


def _run(given: argparse.Namespace) -> Any:
    """The run that the options describe."""
    from onnxtrain.cli.data import DataSet
    from onnxtrain.cli.runs import Files, Run, Settings

    if given.save_every is not None and given.save_every < 1:
        raise OptionError(f"--save-every is {given.save_every}", cure="give 1 or more")
    files = Files(Path(given.folder), given.prefix)
    names, only_size = _inputs(files.model("training"))
    data = DataSet.read(given.data, names)
    settings = Settings(
        given.epochs,
        _batch_size(given.batch_size, only_size),
        given.lr,
        given.schedule,
        given.warmup,
        given.seed,
        given.valid_share,
        only_size is not None,
        data.digest(),
    )
    held_out = DataSet.read(given.valid, names) if given.valid else None
    if given.valid_share:
        data, held_out = data.split(given.valid_share, given.seed)
    if given.accuracy and held_out is None:
        raise OptionError("--accuracy has no data to be measured on", cure="give --valid or --valid-share")
    accuracy = (given.accuracy, given.labels) if given.accuracy else None
    return Run(files, settings, data, held_out, device=given.device, resume=given.resume, accuracy=accuracy)


def _inputs(path: Path) -> tuple[list[str], int | None]:
    """Names of the inputs of a training model, and the only number of rows that it takes, if there is one."""
    from onnxtrain.api.session import read_model

    proto, facts, _ = read_model(path, "training")
    shapes = [v.type.tensor_type.shape for v in proto.graph.input if v.name in facts["inputs"]]
    sizes = {s.dim[0].dim_value for s in shapes if s.dim and s.dim[0].HasField("dim_value")}
    return facts["inputs"], max(sizes, default=None)


def _batch_size(given: int | None, only: int | None) -> int:
    if only is None:
        return _BATCH if given is None else given
    if given not in (None, only):
        raise OptionError(f"--batch-size is {given}, the model takes {only} rows at a time", cure=f"give {only}")
    return only


def _announce(run: Any) -> None:
    """Say what will be trained, from where."""
    settings, at = run.settings, run.position
    held_out = f", {len(run.held_out):,} held out" if run.held_out is not None else ""
    rows = f"{len(run.data):,} rows{held_out}"
    print(f"{rows}; batch size {settings.batch_size}, steps per epoch {run.steps}", flush=True)
    if at.epoch >= settings.epochs:
        print(f"all of {settings.epochs} epochs are done", flush=True)
    elif run.is_resumed:
        print(f"goes on in epoch {at.epoch + 1} after {at.batch} of {run.steps} steps", flush=True)


def _export(given: argparse.Namespace) -> int:
    from onnxtrain import api
    from onnxtrain.cli.runs import Files

    files = Files(Path(given.folder), given.prefix)
    trained = files.trained if files.trained.exists() else files.checkpoint
    checkpoint = Path(given.checkpoint) if given.checkpoint else trained
    state = api.CheckpointState.load_checkpoint(checkpoint)
    module = api.Module(files.model("training"), state, files.model("eval"))
    module.export_model_for_inferencing(given.model, given.output)
    print(f"{given.model}: the model with the parameters of {checkpoint}")
    return 0
