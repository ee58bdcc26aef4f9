"""Calls become nodes: what a translation writes, where torch.onnx's is taken, and what a start imports."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from parity import Applied, pair, same_step

from onnxtrain.capture import capture, translator
from onnxtrain.capture.nodes import Nodes, Value, added_to, op
from onnxtrain.capture.translations import TRANSLATIONS

INDEX = torch.tensor([[0, 2], [1, -1]])

_NEAR = torch.arange(-20, 20) * 0.1

CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "an index of the first axis": lambda x: x[INDEX],
    "an index of the last axis": lambda x: x[..., INDEX],
    "an index of int32": lambda x: x[:, INDEX.int()],
    "an index of int32 in front": lambda x: x[INDEX.int()],
    "indices side by side": lambda x: x[:, INDEX, INDEX[0]],
    "indices in front": lambda x: x[INDEX, INDEX[:1]],
    "indices apart": lambda x: x[INDEX, :, INDEX[0]],
    "indices of two types": lambda x: x[INDEX, INDEX.int()],
    "an index by a mask": lambda x: x[x > 0],
    "joined with a vector of nothing": lambda x: torch.cat([torch.zeros(0), x, x], dim=-1),
    "joined with wider nothing": lambda x: torch.cat([torch.zeros(0, dtype=torch.float64), x], dim=-2),
    "joined with nothing else": lambda x: torch.cat([torch.zeros(0), x], dim=1),
    "padded on two axes": lambda x: F.pad(x, (1, 2, 0, 3), value=0.5),
    "padded and cut": lambda x: F.pad(x, (-1, 2)),
    "padded by a mirror": lambda x: F.pad(x, (2, 1), mode="reflect"),
    "a slice beyond the end": lambda x: (x * 2)[..., :2][:, 6:],
    "flipped": lambda x: x.flip(0, 2),
    "a diagonal": lambda x: x.diagonal_scatter(x.diagonal(1, 2, -2) * x.mean(), 1, 2, -2),
    "a diagonal below": lambda x: x.transpose(0, 2).diagonal_scatter(x.transpose(0, 2).diagonal(-1) * 2, -1),
    "a diagonal of nothing": lambda x: x.diagonal_scatter(x.diagonal(9).exp(), 9),
    "a diagonal of another type": lambda x: x.double().diagonal_scatter(x.diagonal().float() * 2),
    "a place of another type": lambda x: x.double().select_scatter(x[:, 0].float() * 2, 1, 0),
    "places of another type": lambda x: x.slice_scatter((x[:, :2] * 3).half(), 1, 0, 2),
    "whole numbers in places": lambda x: x.select_scatter(torch.ones_like(x[:, 0], dtype=torch.int64), 1, -1),
    "a mask that is a truth value": lambda x: F.scaled_dot_product_attention(x, x, x, (x * 0 == 0).all()),
    "a mask that is no truth": lambda x: F.scaled_dot_product_attention(x, x, x, (x * 0 != 0).all()) + x,
    "a mask that is a number": lambda x: F.scaled_dot_product_attention(x, x, x, x.detach().mean()),
    "a mask of keys": lambda x: F.scaled_dot_product_attention(x, x, x, x[0, :, 0] > 0),
    "a learned mask of keys": lambda x: F.scaled_dot_product_attention(x, x, x, x[0, :, 0]),
    "truth values of a diagonal": lambda x: x * (x > 0).diagonal_scatter((x < 1).diagonal()),
    "a sum in another type": lambda x: (x * 1e3).half().sum(-1, dtype=torch.float64),
    "a mean of everything": lambda x: x.mean(()),
    "a mean in another type": lambda x: x.mean(dtype=torch.float64),
    "softmax in another type": lambda x: x.half().softmax(1, dtype=torch.float32),
    "logarithms of softmax in another type": lambda x: (
        F.log_softmax(x.half(), 1, dtype=torch.float64)
        + torch.special.softmax(x.half(), -1, torch.float32)
        + F.softmin(x.half(), 0, dtype=torch.float32)
        + torch.special.log_softmax(x.mean().half(), 0, dtype=torch.float64)
    ),
    "softmax of whole numbers": lambda x: (
        x * torch.special.softmax((3 * x).long(), 1, dtype=torch.float32)
        + x * torch.log_softmax(x > 0, 2, dtype=torch.float64)
    ),
    "softmax of a number": lambda x: x.mean().softmax(0),
    "reductions of a number": lambda x: (
        x.mean().prod(0) + x.sum().amax(-1) * x.mean().logsumexp(0) + x.mean().norm(dim=0) + x.mean().cumprod(0)
    ),
    "products in another type": lambda x: x.prod(1, dtype=torch.float64).sum() + x.half().prod(dtype=torch.float32),
    "products of whole numbers and truth": lambda x: x * (3 * x).round().int().prod(0) + (x > -9).prod() * x,
    "a range in between": lambda x: x.sum() * torch.arange(1, x.shape[1], 0.5),
    "a range of sizes": lambda x: x * torch.arange(2, 2 + x.shape[2], dtype=torch.float64),
    "quotients of near multiples": lambda x: x * _NEAR.div(0.1, rounding_mode="floor").sum() + 1 // x.detach(),
    "quotients by nothing": lambda x: x * (torch.tensor([1.0, 0.0]) // torch.zeros(2)).nan_to_num(posinf=9.0).sum(),
    "remainders of a number": lambda x: x * (1.0 % x.detach()),
    "a window of Hamming": lambda x: x * torch.hamming_window(x.shape[1])[:, None],
    "a range of int8": lambda x: x * torch.arange(x.shape[2], dtype=torch.int8),
    "a negative zero": lambda x: torch.copysign(x, torch.full_like(x, -0.0)) + torch.copysign(x, torch.zeros_like(x)),
    "twice another": lambda x: torch.add(x, x.cos(), alpha=2).sub(x.sin(), alpha=0.5),
    "truth values": lambda x: ((x > 0) * (x < 1) | ~(x > 0.5)).double() + ((x > 0) & (x > 1)).double(),
    "filled by a number": lambda x: x.masked_fill(x > 0, -1e30),
    "filled by a tensor": lambda x: x.masked_fill(x > 0, torch.tensor(2)),
    "a transposed convolution": lambda x: F.conv_transpose1d(x, torch.ones(3, 2, 3), stride=2, output_padding=1),
    "one of what is no batch": lambda x: F.conv_transpose1d(x[0], torch.ones(3, 2, 3), padding=1),
    "pooled": lambda x: F.max_pool2d(x, 2, ceil_mode=True, padding=1),
    "resized to sizes": lambda x: F.interpolate(x[None], size=(x.shape[1] * 2, 5), mode="bilinear"),
    "taken from a number": lambda x: torch.rsub(x, 2, alpha=3) + torch.where(x > 0, x, 0.5) + 2.0**x,
    "a number elsewhere": lambda x: (
        x * torch.where(x > 0, 1 - (x > 1).long(), 2) + x * torch.where(x > 0, x.long(), 0.5)
    ),
    "the larger and the smaller": lambda x: torch.max(x, x.cos()) - torch.minimum(x, x.detach().half()),
    "extremes of truth values": lambda x: x * (x > 0).max(0)[0] + (x > 0).min(-1, keepdim=True)[1] * x,
    "repeated with further axes": lambda x: x.repeat(2, 1, 1, 3) + x.mean().repeat(12),
    "repeated by a size": lambda x: x.repeat(1, x.shape[0], 1),
    "selected again": lambda x: x.index_select(-2, INDEX[0]) + x.index_select(1, torch.tensor(1)).square(),
    "differences": lambda x: (
        x.diff(n=2).sum() * x.diff(dim=1, prepend=x[:, :1], append=x[:, :2]) * (x > 0).diff(dim=0).sum()
    ),
    "put into a slice": lambda x: x.slice_scatter(x[:, :1] * 2, 1, -1).slice_scatter(x[:, :2].exp(), 1, 1, 9),
    "put into a part": lambda x: x.slice_scatter(x[:, :1] * 2, 1, -3, -2).slice_scatter(x[:, :2].exp(), 1, 0, 3, 2),
    "put into nothing": lambda x: (
        x.slice_scatter(x[:, :0], 1, 2, 1).slice_scatter(x[:, :0], 1, 9).select_scatter(x[0], 0, -2)
    ),
    "a squared error": lambda x: F.mse_loss(x, x.detach().cos(), reduction="none"),
    "products by their axes": lambda x: torch.einsum("bij, bkj", x, x.cos()) + torch.einsum("b...->...", x.sin()).sum(),
    "resized by corners": lambda x: F.interpolate(x[None], scale_factor=2, mode="bilinear", align_corners=True),
}
if torch.__version__ >= "2.12":  # eager PyTorch has no gradient of it before
    CALLS["a squared error of two types"] = lambda x: F.mse_loss(x, x.detach().half()) * x


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore:The default behavior for interpolate")
def test_a_call_is_what_it_is_in_eager(name: str) -> None:
    ours, eager = pair(Applied(CALLS[name]))
    for batch in (4, 3):
        same_step(ours, eager, torch.randn(batch, 3, 4))


QUOTIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of tensors": lambda x: x // x.detach().cos() + x % x.detach().sin(),
    "by a number": lambda x: x // 0.1 + x.div(-3.0, rounding_mode="floor") + x % 0.3,
    "of a number": lambda x: 2.0 // x.detach() + 2.0 % x.detach(),
    "towards 0": lambda x: (
        x.div(0.1, rounding_mode="trunc") + x.frac() + x.trunc() + torch.xlogy(x, 2) + torch.xlogy(2, x)
    ),
}


@pytest.mark.parametrize("name", QUOTIENTS)
def test_quotients_rounded_down_are_nodes_of_onnx(name: str) -> None:
    graph = capture(Applied(QUOTIENTS[name]), (torch.ones(2, 3),), {}).graph.model.graph
    assert "ATen" not in {node.op_type for node in graph}


@pytest.mark.parametrize("module", [torch.nn.Dropout1d(0.4), torch.nn.Dropout2d(1.0), torch.nn.Dropout3d(0.5)], ids=str)
def test_channels_are_dropped_by_eagers_numbers(module: torch.nn.Module) -> None:
    ours, eager = pair(module)
    x = torch.randn(4, 6, *(3 for _ in range(int(type(module).__name__[-2]))), requires_grad=True)
    torch.manual_seed(3)
    made = ours(x)
    torch.manual_seed(3)
    assert torch.equal(made, eager(x))


def test_most_models_start_without_onnxscript() -> None:
    program = """
    import sys, torch
    from onnxtrain import ORTModule

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
            self.read = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu")
            self.embed = torch.nn.Embedding(9, 8)

        def forward(self, image, ids, labels):
            seen = torch.nn.functional.max_pool2d(self.seen(image), 2).flatten(2).transpose(1, 2)
            read = self.read(torch.cat([seen, self.embed(ids)], 1), src_key_padding_mask=None)
            return torch.nn.functional.cross_entropy(read[:, 0], labels)

    loss = ORTModule(Model())(torch.randn(2, 3, 8, 8), torch.ones(2, 5).long(), torch.tensor([0, 1]))
    loss.backward()
    print("onnxscript" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_what_is_written_often_needs_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def moved(ids: torch.Tensor) -> torch.Tensor:
        made = ids.new_zeros(ids.shape)
        made[:, 1:] = ids[:, :-1].clone()
        made[:, 0] = 3
        return torch.where(made > 2, made, 1).repeat(2, 1).diff().index_select(0, torch.tensor([0]))

    def forward(ids: torch.Tensor) -> torch.Tensor:
        distances = 1.0 - torch.min(ids.abs(), torch.ones_like(ids)) * torch.tensor(0.5)
        return F.mse_loss(torch.einsum("ij->j", 2.0**distances).square(), moved(ids.long()).sum() * distances[0])

    monkeypatch.setattr(translator, "has_translation", lambda target, opset: pytest.fail(f"{target} is looked for"))
    capture(Applied(forward), (torch.ones(2, 5),), {})


def nodes_of(write: Callable[[Value], object], dtype: ir.DataType = ir.DataType.FLOAT16) -> list[ir.Node]:
    """What a translation adds for a vector."""
    nodes, x = Nodes(), Value(name="x", type=ir.TensorType(dtype), shape=ir.Shape([3]))
    with added_to(nodes):
        write(x)
    return nodes.taken()


def test_a_number_has_the_type_of_the_other_operands() -> None:
    constant, add = nodes_of(lambda x: op.Add(x, 0.5))
    assert constant.attributes["value"].value.dtype == ir.DataType.FLOAT16  # type: ignore[union-attr]
    assert add.inputs[1] is constant.outputs[0]


def test_sizes_among_numbers_are_joined() -> None:
    *_, concat, reshape = nodes_of(lambda x: op.Reshape(x, [1, op.Size(x)]))
    assert (concat.op_type, reshape.inputs[1]) == ("Concat", concat.outputs[0])
    assert all(v is not None and v.producer().op_type in ("Constant", "Reshape") for v in concat.inputs)  # type: ignore[union-attr]


def test_the_zeros_are_two_constants() -> None:
    made = nodes_of(lambda x: (op.Add(x, 0.0), op.Add(x, -0.0), op.Add(x, 0.0)))
    assert [n.op_type for n in made] == ["Constant", "Add", "Constant", "Add", "Add"]


def test_what_is_left_out_has_the_default_of_onnx() -> None:
    (node,) = nodes_of(lambda x: op.Softmax(x))
    assert node.attributes["axis"].value == -1


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda x: op.Transpose(x, [0]), "Transpose has 1 inputs, not 2; attributes have names"),
        (lambda x: op.Cast(x), "Cast needs to"),
    ],
)
def test_a_translation_that_is_wrong_says_so(write: Callable[[Value], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        nodes_of(write)


def test_a_translation_may_leave_a_call_to_torch_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def no(x: Value) -> object:
        asked.append(x)
        return NotImplemented

    monkeypatch.setitem(TRANSLATIONS, torch.ops.aten.cos.default, no)
    same_step(*pair(Applied(lambda x: x.cos() + 1)), torch.randn(3))
    assert asked


@pytest.mark.parametrize(
    ("target", "wrong"),
    [
        (torch.ops.aten.cos.default, lambda x: op.Unsqueeze(op.Cos(x), [0])),
        (torch.ops.aten.cos.default, lambda x: op.Cast(op.Cos(x), to=ir.DataType.FLOAT16)),
        (torch.ops.aten.select.int, lambda x, axis, place: op.Gather(x, [place], axis=axis)),
    ],
)
def test_a_translation_that_gives_what_the_trace_does_not_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, target: object, wrong: Callable[..., object]
) -> None:
    monkeypatch.setitem(TRANSLATIONS, target, wrong)
    wrapped, eager = pair(Applied(lambda x: x.cos().select(1, 0) * 2))
    for rows in (3, 2):
        same_step(wrapped, eager, torch.randn(rows, 4))
    assert f"aten::{str(target).removeprefix('aten.').removesuffix('.default')}" in wrapped.graph("captured")


@pytest.mark.parametrize("find", [torch.nonzero, torch.argwhere])
@pytest.mark.parametrize("backend", ["torch", "onnxruntime", "reference"])
def test_a_number_that_is_not_zero_is_a_row_of_no_places(backend: str, find: Callable[..., torch.Tensor]) -> None:
    wrapped, _ = pair(Applied(lambda x: find(x.sum())), backend=backend)
    for x, count in ((torch.ones(2, 3), 1), (torch.zeros(2, 3), 0)):
        assert wrapped(x).shape == (count, 0)
