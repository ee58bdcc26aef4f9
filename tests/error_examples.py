"""Programs that raise each class of errors; ``make errors`` writes the page of them.

Each is complete, and the message on the page is what it raises.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import tempfile
from pathlib import Path

from onnxtrain.errors import OnnxTrainError, kinds
from onnxtrain.gradient import registry, rules  # noqa: F401  which fill the table of the other

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"

_MODEL = '''
import onnx

model = onnx.parser.parse_model("""
<ir_version: 10, opset_import: ["" : 20]>
small (float[batch, 4] x) => (float[batch, 2] y) <float[{rows}, 2] w>
{{
    y = MatMul (x, w)
}}
""")
weight = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [{rows}, 2], [0.5] * {rows} * 2)
model.graph.initializer.append(weight)
onnx.save(model, "model.onnx")
'''

EXAMPLES: dict[str, str] = {
    "OptionError": """
from onnxtrain import Options

Options(backend="tensorflow")
""",
    "ModuleError": """
from onnxtrain import ORTModule

ORTModule(lambda x: x)
""",
    "UnsupportedDataError": """
import torch
from onnxtrain import ORTModule


class Settings:
    scale = 2.0


class Scaled(torch.nn.Linear):
    def forward(self, x, settings):
        return super().forward(x) * settings.scale


ORTModule(Scaled(4, 2))(torch.randn(3, 4), Settings())
""",
    "DeviceError": """
import torch
from onnxtrain import ORTModule

ORTModule(torch.nn.Linear(4, 2))(torch.randn(3, 4, device="meta"))
""",
    "CaptureError": """
import torch
from onnxtrain import ORTModule

factors = iter([1.0, 2.0] * 100)


class Alternating(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * next(factors)


ORTModule(Alternating(4, 2))(torch.randn(3, 4))
""",
    "ContentError": """
import torch
from onnxtrain import ORTModule


class Aligned(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * (x.data_ptr() % 64 == 0)


ORTModule(Aligned(4, 2))(torch.randn(3, 4))
""",
    "HostRandomError": """
import random

import torch
from onnxtrain import ORTModule


class Noisy(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * random.random()


ORTModule(Noisy(4, 2))(torch.randn(3, 4))  # a warning: this call runs in eager PyTorch
""",
    "NumberError": """
import numpy
import torch
from onnxtrain import ORTModule


class Counting(torch.nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.calls = numpy.zeros(1)

    def forward(self, x):
        self.calls[0] += 1
        return super().forward(x) * self.calls[0]


ORTModule(Counting(4, 2))(torch.randn(3, 4))
""",
    "SetUpError": """
import torch
from onnxtrain import ORTModule


class Growing(torch.nn.Module):
    def forward(self, x):
        self.layer = torch.nn.Linear(4, 2)
        return self.layer(x)


model = ORTModule(Growing())
for _ in range(2):
    model(torch.randn(3, 4))
""",
    "ShapeError": """
import onnx_ir as ir
from onnxtrain.ir.builder import Builder

graph = ir.Graph([], [], nodes=[], opset_imports={"": 20})
a, b = (ir.val(name, dtype=ir.DataType.FLOAT, shape=[rows, 4]) for name, rows in (("a", 2), ("b", 3)))
Builder(graph).Add(a, b)  # as a pass of one's own may
""",
    "GraphError": """
from onnxtrain import artifacts

artifacts.weights("model.onnx")
""",
    "GradientError": """
import torch
from onnxtrain import ORTModule

loss = ORTModule(torch.nn.Linear(4, 2))(torch.randn(3, 4)).sum()
loss.backward()
loss.backward()
""",
    "RuleError": """
import torch
from onnxtrain import ORTModule
from onnxtrain.gradient import gradient


@gradient("Tanh", replace=True)
def tanh(ctx, dy, x):
    return ctx.no_such_operator(dy)


model = ORTModule(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Tanh()))
model(torch.randn(3, 4)).sum().backward()
""",
    "BackendError": """
import torch
from onnxtrain import Options, ORTModule

model = ORTModule(torch.nn.Linear(4, 2), options=Options(backend="onnxruntime"))
model.memory_report(torch.randn(3, 4))
""",
    "BudgetError": """
import torch
from onnxtrain import Options, ORTModule

model = ORTModule(torch.nn.Linear(256, 256), options=Options(memory_budget=1024))
model(torch.randn(64, 256)).sum().backward()
""",
    "OptimizerError": """
import torch
from onnxtrain.optim import FusedAdam

FusedAdam(torch.nn.Linear(4, 2).parameters(), adam_w_mode=3)
""",
    "VerificationError": """
import torch
from onnxtrain import verify

calls = []


@torch.library.custom_op("example::drift", mutates_args=())
def drift(x: torch.Tensor) -> torch.Tensor:
    calls.append(x)
    return x + len(calls)


drift.register_fake(torch.empty_like)


class Drifting(torch.nn.Linear):
    def forward(self, x):
        return drift(super().forward(x).detach())


verify(Drifting(4, 2, bias=False), torch.zeros(3, 4))
""",
    "ArtifactError": f"""{_MODEL.format(rows=4)}
from onnxtrain.artifacts import generate_artifacts

generate_artifacts(model, requires_grad=["w"], loss="mse_loss", artifact_directory="run")
""",
    "CheckpointError": """
from onnxtrain.api import CheckpointState

CheckpointState.load_checkpoint("checkpoint")
""",
    "WriteError": """
from pathlib import Path

import torch
from onnxtrain import ORTModule

Path("run.txt").mkdir()
ORTModule(torch.nn.Linear(4, 2)).report("run.txt")
""",
    "DataError": f"""{_MODEL.format(rows=4)}
import numpy
from onnxtrain.api import CheckpointState, Module
from onnxtrain.artifacts import LossType, generate_artifacts

generate_artifacts(model, requires_grad=["w"], loss=LossType.MSELoss, artifact_directory="run")
module = Module("run/training_model.onnx", CheckpointState.load_checkpoint("run/checkpoint"))
module(numpy.ones((3, 4)), numpy.ones((3, 2)))
""",
    "HookError": """
import torch
from onnxtrain.utils.hooks import SubscriberManager

SubscriberManager().subscribe(torch.relu, [])
""",
}


class _Said(logging.Handler):
    """The first error among what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.error: OnnxTrainError | None = None

    def emit(self, record: logging.LogRecord) -> None:
        found = [x for x in record.args or () if isinstance(x, OnnxTrainError)]
        self.error = self.error or next(iter(found), None)


@functools.cache
def error_of(name: str) -> OnnxTrainError | None:
    """What an example raises, or says in a warning; it runs in a folder of its own.

    Args:
        name: class of the error.
    """
    said, log, before = _Said(), logging.getLogger("onnxtrain"), dict(registry.RULES)
    log.addHandler(said)
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            file = Path(folder) / "program.py"
            file.write_text(EXAMPLES[name].lstrip("\n"))
            exec(compile(file.read_text(), str(file), "exec"), {"__name__": "program"})
    except OnnxTrainError as error:
        return error
    finally:
        log.removeHandler(said)
        registry.RULES.clear()
        registry.RULES.update(before)
    return said.error


def page() -> str:
    """The page in Markdown."""
    parts = [
        "# Errors\n",
        "Every error says what failed, on which node of the graph, from which line of yours, and what to do.\n"
        "All are `onnxtrain.OnnxTrainError`, and each is one of Python's classes, too: `except ValueError` has it.\n"
        "`onnxtrain errors NAME` tells the same on the command line.\n",
        "This page is written by `make errors`: each program is run, and the message below it is what it raises.\n",
    ]
    for kind in kinds():
        if kind is OnnxTrainError:
            continue
        error = error_of(kind.__name__)
        message = re.sub(r"\S*/program\.py", "program.py", str(error))
        others = [base.__name__ for base in kind.__mro__ if base.__module__ == "builtins"]
        also = next(name for name in others if name not in ("Exception", "BaseException", "object"))
        meaning = kind.meaning().replace("``", "`")
        parts.append(f"## {kind.__name__}\n\n{meaning} It is a `{also}`.\n")
        parts.append(f"```python\n{EXAMPLES[kind.__name__].strip()}\n```\n\n```text\n{message}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    PAGE.write_text(page())
