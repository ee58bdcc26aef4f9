"""How long the first training step takes: ``python -m benchmarks.start [MODEL ...] [--layers N] [--width N]``.

Each variant starts in a process of its own, imports included: eager PyTorch, ``torch.compile(dynamic=True)``,
ORTModule, and ORTModule with a graph cache that an earlier process filled. What counts is what a first step costs
beyond the eager one's own, in wall seconds and in seconds of the processor: medians, all variants in turn. What a
start costs does not depend on the width, but is hard to see beside the first step of many wide layers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

VARIANTS = ("eager", "compile", "onnxtrain", "cached")
_Case = tuple[Any, dict[str, Any]]  # a model whose output has a loss, and a batch


def _bert(layers: int, width: int) -> _Case:
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    ids = torch.randint(0, 30000, (8, 128))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros(8, dtype=torch.long)}
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": width // 32} if width else {}
    return BertForSequenceClassification(BertConfig(num_hidden_layers=layers or 12, **sizes)), batch


def _gpt2(layers: int, width: int) -> _Case:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = torch.randint(0, 5000, (2, 64))
    sizes = {"n_embd": width, "n_head": width // 32} if width else {}
    model = GPT2LMHeadModel(GPT2Config(n_layer=layers or 12, vocab_size=5000, **sizes))
    return model, {"input_ids": ids, "labels": ids}


def _llama(layers: int, width: int) -> _Case:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = torch.randint(0, 5000, (2, 64))
    width = width or 256
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": width // 32}
    config = LlamaConfig(num_hidden_layers=layers or 4, vocab_size=5000, **sizes)
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def _resnet(layers: int, width: int) -> _Case:
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    batch = {"pixel_values": torch.randn(2, 3, 112, 112), "labels": torch.zeros(2, dtype=torch.long)}
    return ResNetForImageClassification(ResNetConfig(num_labels=10)), batch


def _segmentation(layers: int, width: int) -> _Case:
    import torch
    from transformers import MobileNetV2Config, MobileNetV2ForSemanticSegmentation

    batch = {"pixel_values": torch.randn(2, 3, 128, 128), "labels": torch.zeros(2, 128, 128, dtype=torch.long)}
    return MobileNetV2ForSemanticSegmentation(MobileNetV2Config(num_labels=5)), batch


def _unet(layers: int, width: int) -> _Case:
    import torch

    from benchmarks.networks import UNet

    batch = {"pixel_values": torch.randn(2, 3, 128, 128), "labels": torch.zeros(2, 128, 128, dtype=torch.long)}
    return UNet(), batch


def _lraspp(layers: int, width: int) -> _Case:
    import torch
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = lraspp_mobilenet_v3_large(weights_backbone=None, num_classes=5)

        def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Any:
            return _Loss(torch.nn.functional.cross_entropy(self.model(pixel_values)["out"], labels))

    batch = {"pixel_values": torch.randn(2, 3, 128, 128), "labels": torch.zeros(2, 128, 128, dtype=torch.long)}
    return WithLoss(), batch


@dataclasses.dataclass
class _Loss:
    loss: Any


MODELS: dict[str, Callable[[int, int], _Case]] = {
    "bert": _bert,
    "gpt2": _gpt2,
    "llama": _llama,
    "resnet": _resnet,
    "segmentation": _segmentation,
    "unet": _unet,
    "lraspp": _lraspp,  # of torchvision, which is no dependency
}


def first_step(name: str, variant: str, layers: int, width: int) -> dict[str, float]:
    """Seconds of the first step in this process: of the wall clock and of the processor."""
    import torch

    torch.manual_seed(0)
    model, batch = MODELS[name](layers, width)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    began = time.perf_counter(), time.process_time()
    runs: Any = model
    if variant == "compile":
        runs = torch.compile(model, dynamic=True)
    elif variant != "eager":
        from onnxtrain import ORTModule

        runs = ORTModule(model)
    loss = runs(**batch).loss
    loss.backward()
    optimizer.step()
    return {
        "wall": time.perf_counter() - began[0],
        "processor": time.process_time() - began[1],
        "loss": float(loss.detach()),
    }


def measure(name: str, variant: str, layers: int, width: int, cache: Path) -> dict[str, float]:
    """The same in a process of its own."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # whoever installs the package has its bytecode
    if variant == "cached":
        environment["ORTMODULE_CACHE_DIR"] = str(cache / "graphs")
    command = [sys.executable, "-m", "benchmarks.start", name, "--one", variant]
    command += ["--layers", str(layers), "--width", str(width)]
    filled = (cache / "graphs").exists()
    for _ in range(2 if variant == "cached" and not filled else 1):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}, {variant}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Each figure's median."""
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def report(name: str, found: dict[str, dict[str, float]]) -> str:
    """What each variant's first step costs beyond eager's."""
    eager = found["eager"]
    lines = [f"{name}: eager's first step {eager['wall']:.2f} s, {eager['processor']:.2f} s of the processor"]
    for variant, one in found.items():
        if variant != "eager":
            beyond = {k: one[k] - eager[k] for k in ("wall", "processor")}
            lines.append(
                f"  {variant:<10} {beyond['wall']:7.2f} s beyond it, {beyond['processor']:7.2f} s of the processor;"
                f" loss {one['loss'] - eager['loss']:+.1e}"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the models in turn and print what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--layers", type=int, default=0, help="0 takes the model's own")
    parser.add_argument("--width", type=int, default=0, help="of bert, gpt2 and llama; 0 takes their own")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--repeats", type=int, default=1, help="rounds of all variants")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    names = options.models or list(MODELS)
    if unknown := {*names} - {*MODELS}:
        parser.error(f"unknown models {', '.join(sorted(unknown))}; known are {', '.join(MODELS)}")
    if options.one:
        print(json.dumps(first_step(names[0], options.one, options.layers, options.width)))
        return
    sizes = options.layers, options.width
    variants = ["eager", *(v for v in options.variants.split(",") if v != "eager")]
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            cache = Path(folder)
            rounds = [{v: measure(name, v, *sizes, cache) for v in variants} for _ in range(options.repeats)]
            print(report(name, {v: medians([one[v] for one in rounds]) for v in variants}), flush=True)


if __name__ == "__main__":
    main()
