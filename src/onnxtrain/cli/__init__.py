"""The command line, a module for each family of commands; what a command needs is imported when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from onnxtrain import __version__
from onnxtrain.cli import artifacts, doctor, inspecting, planning, training
from onnxtrain.errors import OnnxTrainError

_FAILED = 2  # exit status of a command that could not do its work; 1 is its finding


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status.

    0 is well, 1 means that something was found, 2 that the command failed, 128 + n that signal n ended it.
    """
    given = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = given.run
    try:
        return run(given)
    except OnnxTrainError as error:
        print(f"onnxtrain: {error}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe has seen enough
        sys.stderr.close()
        return 0
    except OSError as error:  # a full disk, a folder that may not be written
        print(f"onnxtrain: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return _FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("onnxtrain", description="Train PyTorch modules and ONNX models as one graph.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")
    for family in (inspecting, planning, artifacts, training, doctor):
        family.add_to(commands)
    return parser
