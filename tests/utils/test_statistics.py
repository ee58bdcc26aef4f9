"""Statistics and the merge tool: directories of eager PyTorch and ORTModule agree, and say where they part."""

from __future__ import annotations

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import ARCHITECTURES, build

from onnxtrain import ORTModule
from onnxtrain.errors import HookError
from onnxtrain.utils.hooks import GlobalSubscriberManager, StatisticsSubscriber, SubscriberManager, inspect_activation
from onnxtrain.utils.hooks.merge_activation_summary import Recorded, main
from onnxtrain.utils.hooks.statistics import summary


def record(directory, model, batches, **options):
    with SubscriberManager().subscribe(model, [StatisticsSubscriber(directory, **options)]):
        for batch in batches:
            model(**batch).loss.backward()


def order(folder):
    return (folder / "order.txt").read_text().split()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_bert_in_eager_and_in_ortmodule(tmp_path, attention, capsys):
    batches = [ARCHITECTURES["bert"].batch(2, length) for length in (7, 5)]
    eager = build("bert", attention)
    wrapped = ORTModule(copy.deepcopy(eager))
    record(tmp_path / "pt", eager, batches)
    record(tmp_path / "ort", wrapped, batches)
    assert {p.name for p in (tmp_path / "ort").iterdir()} == {"step_0", "step_1"}
    for step in ("step_0", "step_1"):
        assert order(tmp_path / "pt" / step) == order(tmp_path / "ort" / step)
        assert "BertLayer_10_0th_output_forward" in order(tmp_path / "pt" / step)
        assert "BertLayer_10_0th_output_backward" in order(tmp_path / "pt" / step)
    merged = ["--pt_dir", str(tmp_path / "pt"), "--ort_dir", str(tmp_path / "ort"), "--output_dir", str(tmp_path / "m")]
    assert main([*merged, "--rtol", "1e-5"]) == 0
    assert "0 of " in capsys.readouterr().out
    assert len((tmp_path / "m/summary.txt").read_text().splitlines()) == 2 * len(order(tmp_path / "pt/step_0")) + 2


def test_the_first_tensor_that_differs_is_named(tmp_path, capsys):
    eager = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    other = copy.deepcopy(eager)
    with torch.no_grad():
        other[2].bias[1] += 1e-2
    x = torch.ones(2, 4)
    for name, model in (("pt", eager), ("ort", ORTModule(other))):
        with SubscriberManager().subscribe(model, [StatisticsSubscriber(tmp_path / name)]):
            model(x).square().sum().backward()
    (tmp_path / "pt/step_0/Tanh_2_0th_output_backward").unlink()
    merged = [f"--{side}_dir={tmp_path / side}" for side in ("pt", "ort")] + [f"--output_dir={tmp_path / 'm'}"]
    assert main(merged) == 0
    said = capsys.readouterr().out
    assert "first: step_0/Linear_3_0th_output_forward: " in said and "in pt, " in said
    lines = (tmp_path / "m/summary.txt").read_text().splitlines()
    assert any(line.startswith("  step_0/Tanh_2_0th_output_forward: same") for line in lines)
    assert any(line.startswith("* step_0/Tanh_2_0th_output_backward: only in ort") for line in lines)
    sides = (tmp_path / "m/step_0/Linear_3_0th_output_forward").read_text()
    assert repr(eager(x).flatten()[1].item()) in sides and repr(other(x).flatten()[1].item()) in sides
    assert main([*merged, "--rtol", "1"]) == 0
    assert "1 of " in capsys.readouterr().out, "only the missing file is left"


def test_merge_of_nothing_fails(tmp_path):
    (tmp_path / "empty").mkdir()
    tool = [sys.executable, "-m", "onnxtrain.utils.hooks.merge_activation_summary", f"--output_dir={tmp_path / 'm'}"]
    for sides in (("empty", "missing"), ("missing", "empty")):
        given = [f"--{name}_dir={tmp_path / side}" for name, side in zip(("pt", "ort"), sides, strict=True)]
        made = subprocess.run([*tool, *given], capture_output=True, text=True)
        assert made.returncode == 1 and str(tmp_path / sides[0]) in made.stderr
    assert not (tmp_path / "m").exists()


def test_an_existing_directory(tmp_path):
    module, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    with SubscriberManager().subscribe(module, [StatisticsSubscriber(tmp_path / "a")]):
        module(x), module(x)
    (tmp_path / "a/notes.txt").write_text("kept")
    with pytest.raises(FileExistsError, match="override_output_dir"):
        StatisticsSubscriber(tmp_path / "a")
    with SubscriberManager().subscribe(module, [StatisticsSubscriber(tmp_path / "a", override_output_dir=True)]):
        module(x)
    assert {p.name for p in (tmp_path / "a").iterdir()} == {"step_0", "notes.txt"}
    assert {p.name for p in (tmp_path / "a/step_0").iterdir()} == {"order.txt", "Linear_0_0th_output_forward"}
    with pytest.raises(HookError, match="bucket_size"):
        StatisticsSubscriber(tmp_path / "b", bucket_size=0)


def test_limits_repeated_calls_and_points(tmp_path):
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def forward(self, x):
            return inspect_activation("a/point", self.layer(self.layer(x)))

    for wrap in (lambda m: m, ORTModule):
        module, folder = wrap(Twice()), tmp_path / wrap.__name__.strip("<>")
        with GlobalSubscriberManager.subscribe(module, [StatisticsSubscriber(folder, 1, 2)]):
            for _ in range(3):
                module(torch.ones(1, 2)).sum().backward()
        assert [p.name for p in folder.iterdir()] == ["step_1"]
        names = ["Linear_1_0th_output", "Linear_1_0th_output_call1", "a_point", "Twice_0_0th_output"]
        assert order(folder / "step_1") == [f"{n}_forward" for n in names] + [f"{n}_backward" for n in names[::-1]]


TENSORS = (
    torch.randn(7, 30),
    torch.tensor([1.0, -2.0, 0.0, float("nan"), float("inf"), float("-inf")]),
    torch.randn(300).bfloat16(),
    torch.randint(-5, 5, (3, 40)),
    torch.tensor([True, False, True]),
    torch.randn(4, dtype=torch.complex64),
    torch.zeros(0, 3),
    torch.full((5,), float("nan")),
    torch.tensor(3.0),
)


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{t.dtype}{list(t.shape)}")
@pytest.mark.parametrize(("bucket", "cpu"), [(2**29, False), (7, False), (1, True)])
def test_statistics(tmp_path, tensor, bucket, cpu):
    (tmp_path / "t").write_text(summary("t", tensor, bucket, cpu))
    found = Recorded.read(tmp_path / "t")
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten().double().numpy()
    finite = flat[np.isfinite(flat)]
    expected = [finite.min(), finite.max(), finite.mean(), finite.std()] if finite.size else [np.nan] * 4
    stated = [float(found.fields[key]) for key in ("min", "max", "mean", "std")]
    np.testing.assert_allclose(stated, expected, rtol=1e-12, atol=1e-12)
    counts = {"nan": np.isnan(flat), "inf": np.isinf(flat), "neg": flat < 0, "pos": flat > 0, "zero": flat == 0}
    assert {key: int(found.fields[key]) for key in counts} == {key: int(c.sum()) for key, c in counts.items()}
    assert found.fields["shape"] == str(list(tensor.shape)) and found.fields["dtype"] == str(tensor.dtype)
    assert int(found.fields["size"]) == tensor.numel()
    np.testing.assert_array_equal(found.values, flat[:128])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.integers(1, 41))
def test_buckets_do_not_matter(values, bucket):
    lines = [summary("t", torch.tensor(values, dtype=torch.float64), size).splitlines() for size in (bucket, 2**29)]
    for one, whole in zip(*lines, strict=True):
        key, _, value = one.partition(": ")
        if key in ("mean", "std"):
            np.testing.assert_allclose(float(value), float(whole.partition(": ")[2]), rtol=1e-9, atol=1e-6)
        else:
            assert one == whole
