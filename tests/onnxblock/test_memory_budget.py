"""Training models within a memory budget: the same numbers from less memory, in the ordinary onnxruntime."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import digits
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import numpy_helper, parser

from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.artifacts import LossType, OptimType, generate_artifacts
from onnxtrain.errors import BudgetError, OptionError
from onnxtrain.ir import shapes
from onnxtrain.plan.budgets import allowed, first_within

LAYERS = 8
LEVELS = [v for n, v in vars(ort.GraphOptimizationLevel).items() if n.startswith("ORT_")]
WIDTH = 32


def deep(batch: int | str = "batch", dropout: bool = False) -> onnx.ModelProto:
    """Layers whose activations are far larger than their weights."""
    lines, names = [], []
    for i in range(LAYERS):
        names.append(f"weight_{i}")
        drop = f"active_{i + 1}, mask_{i} = Dropout (smooth_{i}, ratio, mode)" if dropout else ""
        lines.append(f"""
            linear_{i} = MatMul (active_{i}, weight_{i})
            bent_{i} = Tanh (linear_{i})
            {"smooth" if dropout else "active"}_{i if dropout else i + 1} = Sigmoid (bent_{i})
            {drop}""")
    constants = """
            ratio = Constant <value = float {0.25}> ()
            mode = Constant <value = bool {1}> ()"""
    model = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        deep (float[{batch}, {WIDTH}] active_0) => (float[{batch}, {WIDTH}] scores)
        {{{constants if dropout else ""}{"".join(lines)}
            scores = Identity (active_{LAYERS})
        }}
    """)
    random = np.random.default_rng(0)
    for name in names:
        content = random.standard_normal((WIDTH, WIDTH), np.float32)
        model.graph.initializer.append(numpy_helper.from_array(content, name))
    return model


def images(batch: int | str = 4) -> onnx.ModelProto:
    """Convolutions with the statistics of the batch."""
    lines = "".join(
        f"""
            made_{i} = Conv <pads = [1, 1, 1, 1]> (active_{i}, kernel_{i})
            normal_{i}, new_mean_{i}, new_var_{i} =
                BatchNormalization <training_mode = 1> (made_{i}, scale_{i}, bias_{i}, mean_{i}, var_{i})
            active_{i + 1} = Clip (normal_{i}, low, high)"""
        for i in range(4)
    )
    model = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        images (float[{batch}, 8, 16, 16] active_0) => (float[{batch}, 8, 1, 1] scores)
        {{
            low = Constant <value = float {{0.0}}> ()
            high = Constant <value = float {{6.0}}> (){lines}
            scores = GlobalAveragePool (active_4)
        }}
    """)
    random = np.random.default_rng(0)
    for i in range(4):
        content = {"kernel": random.standard_normal((8, 8, 3, 3)) / 8, "scale": np.ones(8), "bias": np.zeros(8)}
        for name, array in (content | {"mean": np.zeros(8), "var": np.ones(8)}).items():
            model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), f"{name}_{i}"))
    return model


def made(folder: Path, model: onnx.ModelProto, **options) -> dict[str, Path]:
    given = {"loss": LossType.MSELoss, "optimizer": OptimType.SGD, "artifact_directory": folder}
    return generate_artifacts(model, **given | options)


def trained(paths: dict[str, Path], inputs: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
    """Losses of some steps, and parameters, gradients and statistics after them."""
    state = CheckpointState.load_checkpoint(paths["checkpoint"])
    module = Module(paths["training_model"], state)
    optimizer, found = Optimizer(paths["optimizer_model"], module), {}
    optimizer.set_learning_rate(0.1)
    for index in range(3):
        found[f"loss {index}"] = module(inputs, targets)
        optimizer.step()
        found |= {f"{n}.grad": p.grad.copy() for n, p in state.parameters if p.requires_grad}
        module.lazy_reset_grad()
    return found | {n: p.data for n, p in state.parameters}


def nodes_again(path: Path) -> list[str]:
    return [n.name for n in onnx.load(path).graph.node if n.name.endswith("_recompute")]


@pytest.mark.parametrize("budget", [0.65, "min"])
@pytest.mark.parametrize(
    ("model", "stated"),
    [
        (deep(), {"active_0": (64, WIDTH)}),
        (deep(64), None),
        (deep(dropout=True), {"active_0": (64, WIDTH)}),
        (images(), None),
        (images("batch"), {"active_0": (4, 8, 16, 16)}),
    ],
    ids=["layers", "static layers", "dropout", "static images", "images"],
)
def test_the_same_numbers(model: onnx.ModelProto, stated, budget: float | str, tmp_path: Path) -> None:
    plain = made(tmp_path / "plain", model)
    paths = made(tmp_path / "small", model, memory_budget=budget, worst_case=stated)
    assert nodes_again(paths["training_model"]) and not nodes_again(plain["training_model"])
    random = np.random.default_rng(1)
    dims = [d.dim_value or 64 for d in model.graph.input[0].type.tensor_type.shape.dim]
    for count in [dims[0]] if stated is None else [dims[0], 5]:
        inputs = random.standard_normal([count, *dims[1:]], np.float32)
        targets = random.random([count, *([WIDTH] if len(dims) == 2 else [8, 1, 1])], np.float32)
        found, expected = trained(paths, inputs, targets), trained(plain, inputs, targets)
        for name, value in expected.items():
            if "mask_0" in str(model.graph):  # x / (1 - ratio) in place of x * (1 / (1 - ratio))
                np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-9, err_msg=name)
            else:
                np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_nodes_run_again_and_late(level: ort.GraphOptimizationLevel, tmp_path: Path) -> None:
    """onnxruntime neither merges what is computed again with the originals nor runs it early."""
    paths = made(tmp_path, deep(), memory_budget=0.65, worst_case={"active_0": (64, WIDTH)})
    names = nodes_again(paths["training_model"])
    assert len(names) >= LAYERS // 2
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    session = ort.InferenceSession(paths["training_model"], options, ["CPUExecutionProvider"])
    state = CheckpointState.load_checkpoint(paths["checkpoint"])
    zeros = {f"{n}_grad.accumulation.buffer": np.zeros(p.form.shape, np.float32) for n, p in state.parameters}
    rows = np.ones((64, WIDTH), np.float32)
    given = {"active_0": rows, "target": rows, "lazy_reset_grad": np.array(True)}
    session.run(None, given | zeros | {n: p.data for n, p in state.parameters})
    events = json.loads(Path(session.end_profiling()).read_text())
    run = [e["name"].removesuffix("_kernel_time") for e in events if e["name"].endswith("_kernel_time")]
    place = {name: index for index, name in enumerate(run)}
    assert {*names} <= {*run}, "all are still there"
    added = [place[f"weight_{i}_grad.accumulation.out.If"] for i in range(LAYERS)]
    assert added == sorted(added, reverse=True), "each gradient is added when it is there"
    for name in names:
        layer = int(name.removesuffix("_recompute").rsplit("_", 1)[1])
        late = [i for i in range(LAYERS) if i > layer + 1]
        assert all(added[i] < place[name] for i in late), f"{name} runs before the layers after it are done"


_MEASURE = """
import sys, gc
import numpy as np, onnxruntime as ort
from pathlib import Path
from onnxtrain.api import CheckpointState
def status(key):
    return int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1]) / 1024
folder = Path(sys.argv[1])
state = CheckpointState.load_checkpoint(folder / "checkpoint")
options = ort.SessionOptions()
options.enable_cpu_mem_arena = options.enable_mem_pattern = False
options.intra_op_num_threads = 1
session = ort.InferenceSession(folder / "training_model.onnx", options, ["CPUExecutionProvider"])
rows = np.ones((16384, 32), np.float32)
feeds = {"active_0": rows, "target": rows, "lazy_reset_grad": np.array(True)}
for name, parameter in state.parameters:
    feeds |= {name: parameter.data, f"{name}_grad.accumulation.buffer": np.zeros(parameter.form.shape, np.float32)}
gc.collect()
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
session.run(None, feeds)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read from /proc")
def test_the_peak_of_a_session_falls(tmp_path: Path) -> None:
    stated = {"active_0": (16384, WIDTH)}  # 2 MiB each
    made(tmp_path / "plain", deep())
    made(tmp_path / "small", deep(), memory_budget=0.65, worst_case=stated)
    script = tmp_path / "measure.py"
    script.write_text(_MEASURE)
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, str(script)]
    plain, small = (
        float(subprocess.run([*command, str(tmp_path / n)], check=True, capture_output=True, env=environment).stdout)
        for n in ("plain", "small")
    )
    assert small < 0.7 * plain, f"{small} MiB rather than {plain} MiB"


def test_a_budget_of_bytes_and_one_that_nothing_fits(tmp_path: Path) -> None:
    stated = {"active_0": (1024, WIDTH)}
    with pytest.raises(BudgetError, match=r"needs at least [\d.]+ .iB beside its weights and inputs, and the budget"):
        made(tmp_path, deep(), memory_budget="10 KB", worst_case=stated)
    assert not [*tmp_path.iterdir()], "nothing is written"
    few = nodes_again(made(tmp_path, deep(), memory_budget="1600KiB", worst_case=stated)["training_model"])
    many = nodes_again(made(tmp_path, deep(), memory_budget="1200KiB", worst_case=stated)["training_model"])
    none = nodes_again(made(tmp_path, deep(), memory_budget="1GB", worst_case=stated)["training_model"])
    assert len(none) == 0 < len(few) < len(many)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_budget": 0.65}, r'worst_case=\{"active_0": \(batch, 32\), "target"'),
        ({"memory_budget": 0.5, "worst_case": {"activ": (3, 4)}}, "there is no input activ; close names: active_0"),
        ({"memory_budget": 0.5, "worst_case": {"active_0": (3,)}}, "active_0 has 2 axes, not 1"),
        ({"memory_budget": 0.5, "worst_case": {"active_0": (3, 4)}}, "where 32 is the size"),
        ({"memory_budget": 0.5, "worst_case": {"active_0": (3, 32), "target": (4, 32)}}, "where 3 is the size batch"),
        ({"memory_budget": "half"}, "memory_budget='half' is no number of bytes"),
        ({"worst_case": {"active_0": "many"}}, "is not a shape"),
    ],
)
def test_what_cannot_be_planned_is_an_error(options: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        made(tmp_path, deep(), **options)


def test_the_other_format_computes_again_too(tmp_path: Path) -> None:
    made(tmp_path, deep(), memory_budget=0.65, worst_case={"active_0": (64, WIDTH)}, ort_format=True)
    content = (tmp_path / "training_model.ort").read_bytes()
    assert content.count(b"_recompute") >= len(nodes_again(tmp_path / "training_model.onnx"))


def test_the_backward_pass_reads_no_sizes_of_activations(tmp_path: Path) -> None:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 20]>
        sizes (float[batch, length, 8] x) => (float[batch] scores)
        {
            axes = Constant <value = int64[2] {1, 2}> ()
            wide = MatMul (x, weight)
            bent = Tanh (wide)
            half = Slice (bent, zero, three, one)
            scores = ReduceMean <keepdims = 0> (half, axes)
        }
    """)
    content = {"weight": np.ones((8, 512), np.float32)} | {
        n: np.array([v]) for n, v in {"zero": 0, "one": 1, "three": 3}.items()
    }
    model.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in content.items())
    paths = made(tmp_path, model, requires_grad=["weight"], memory_budget=1.0, worst_case={"x": (16, 32, 8)})
    graph = ir.load(paths["training_model"]).graph
    read = [n.inputs[0] for n in graph if n.op_type in ("Shape", "Size")]
    assert not [v.name for v in read if v is not None and v.name in ("wide", "bent", "half")]
    assert shapes.known_dims(graph.inputs[0])[2] == 8


def test_dropout_keeps_what_it_drew(tmp_path: Path) -> None:
    model = digits.network()
    paths = made(tmp_path, model, loss=LossType.CrossEntropyLoss, memory_budget="min", worst_case={"image": (64, 64)})
    drawn = [n for n in onnx.load(paths["training_model"]).graph.node if n.op_type == "Dropout"]
    assert len(drawn) == sum(n.op_type == "Dropout" for n in model.graph.node)


def test_the_search_finds_the_first_that_fits() -> None:
    peaks = [100, 90, 70, 60, 60]
    assert [first_within(4, peaks.__getitem__, most) for most in (100, 95, 70, 60)] == [0, 1, 2, 3]
    assert first_within(4, peaks.__getitem__, 10) == 4
    assert [allowed(b, 200) for b in (0.5, 64, "min")] == [100, 64, 0]
