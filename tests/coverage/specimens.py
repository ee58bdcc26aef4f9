"""Architectures that people export, at toy size: of torchvision, timm, Transformers and torch itself.

What is not installed is left out.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from catalogue import ARCHITECTURES
from torch import nn

CLASSES, VOCABULARY = 4, 40
LIBRARIES = ("torch", "torchvision", "timm", "transformers")


@dataclasses.dataclass(frozen=True)
class Specimen:
    """One architecture.

    Args:
        name: the library's own.
        library: whose it is.
        module: makes it.
        batch: makes a batch: the tensors of a call by the names of their arguments.
        text: whether the second axis of its inputs is a length that varies, as the first does.
    """

    name: str
    library: str
    module: Callable[[], nn.Module]
    batch: Callable[[], dict[str, torch.Tensor]]
    text: bool = False

    def build(self) -> nn.Module:
        """The module in evaluation mode, random: no two elements of its parameters are the same, no dropout."""
        torch.manual_seed(0)
        module = self.module().eval()
        for part in module.modules():
            if isinstance(part, nn.modules.dropout._DropoutNd):
                part.p = 0.0
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        self._settle(module)
        return module

    def _settle(self, module: nn.Module) -> None:
        """Give BatchNormalization the statistics of a batch, as a model that was trained has them."""
        parts = [p for p in module.modules() if isinstance(p, nn.modules.batchnorm._BatchNorm)]
        if parts:
            momenta = [p.momentum for p in parts]
            for part in parts:
                part.momentum = 0.9
            with torch.no_grad():
                module.train()(**self.batches(1)[0])
            module.eval()
            for part, momentum in zip(parts, momenta, strict=True):
                part.momentum = momentum

    def batches(self, count: int, vary: bool = True) -> list[dict[str, torch.Tensor]]:
        """Batches twice as large as ``batch`` makes them; of text each second one is shorter, if lengths may vary."""
        made = []
        for i in range(count):
            torch.manual_seed(i + 1)
            first, second = self.batch(), self.batch()
            given = {name: torch.cat((tensor, second[name])) for name, tensor in first.items()}
            if vary and self.text and i % 2:
                given = {name: tensor[:, : tensor.shape[1] - 3] for name, tensor in given.items()}
            made.append(given)
        return made


def _images(size: int, argument: str = "x") -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {argument: torch.randn(2, 3, size, size)}


def _ids() -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(0, VOCABULARY, (2, 9))}


class Tagger(nn.Module):
    """A recurrent layer over tokens, and a class for each."""

    def __init__(self, kind: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.recurrent = kind(12, 16, batch_first=True, **settings)
        self.head = nn.Linear(32 if self.recurrent.bidirectional else 16, CLASSES)

    def forward(self, ids):
        return self.head(self.recurrent(self.embedding(ids))[0])


class Encoder(nn.Module):
    """torch's own transformer layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, ids):
        return self.head(self.layers(self.embedding(ids)).mean(1))


class Keywords(nn.Module):
    """Convolutions over sound, as keyword spotters have them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 8, 9, 4), nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(4),
            nn.Conv1d(8, 16, 3), nn.GroupNorm(4, 16), nn.SiLU(), nn.AdaptiveAvgPool1d(1),
        )  # fmt: skip
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head(self.layers(x).flatten(1))


class UNet(nn.Module):
    """Down and up again, with what was there before beside it: a number for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)
        self.up, self.last = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 1, 3, padding=1)
        self.norm = nn.InstanceNorm2d(8, affine=True)

    def forward(self, x):
        first = torch.relu(self.norm(self.down(x)))
        both = torch.cat((self.up(torch.relu(self.deep(first))), first), 1)
        return nn.functional.interpolate(self.last(both), scale_factor=2.0, mode="bilinear")


def _torch() -> list[Specimen]:
    def tagger(kind, **settings):
        return lambda: Tagger(kind, **settings)

    return [
        Specimen("LSTM tagger", "torch", tagger(nn.LSTM, bidirectional=True), _ids, text=True),
        Specimen("GRU tagger", "torch", tagger(nn.GRU), _ids, text=True),
        Specimen("TransformerEncoder", "torch", Encoder, _ids, text=True),
        Specimen("keyword spotter", "torch", Keywords, lambda: {"x": torch.randn(2, 1, 400)}),
        Specimen("U-Net", "torch", UNet, _images(16)),
    ]


def _torchvision() -> list[Specimen]:
    def model(name: str, **settings: Any):
        return lambda: getattr(importlib.import_module("torchvision.models"), name)(num_classes=CLASSES, **settings)

    def resnet():
        from torchvision.models import resnet

        return resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)

    def convnext():
        from torchvision.models import convnext

        stages = [convnext.CNBlockConfig(8, 16, 1), convnext.CNBlockConfig(16, None, 1)]
        return convnext.ConvNeXt(stages, num_classes=CLASSES)

    def mobilenet_v3():
        from torchvision.models import mobilenetv3 as v3

        rows = [
            (16, 3, 16, 16, True, "RE", 2, 1),
            (16, 3, 32, 24, False, "RE", 2, 1),
            (24, 5, 48, 40, True, "HS", 2, 1),
        ]
        return v3.MobileNetV3([v3.InvertedResidualConfig(*r, width_mult=1.0) for r in rows], 64, num_classes=CLASSES)

    def efficientnet():
        from torchvision.models import efficientnet as e

        rows = [(1, 3, 1, 32, 16, 1), (6, 3, 2, 16, 24, 1), (6, 5, 2, 24, 40, 1)]
        return e.EfficientNet([e.MBConvConfig(*r) for r in rows], 0.0, stochastic_depth_prob=0.0, num_classes=CLASSES)

    def regnet():
        from torchvision.models import regnet as r

        return r.RegNet(r.BlockParams.from_init_params(2, 8, 8.0, 2.0, 4, se_ratio=0.25), num_classes=CLASSES)

    def densenet():
        from torchvision.models import densenet

        return densenet.DenseNet(8, (2, 2), 16, num_classes=CLASSES)

    def vit():
        from torchvision.models import vision_transformer as v

        return v.VisionTransformer(16, 4, 2, 4, 32, 64, num_classes=CLASSES)

    def swin():
        from torchvision.models import swin_transformer as s

        return s.SwinTransformer([2, 2], 16, [1, 1], [2, 2], [2, 2], stochastic_depth_prob=0.0, num_classes=CLASSES)

    def maxvit():
        from torchvision.models import maxvit as m

        return m.MaxVit((32, 32), 16, 2, [16, 16], [1, 1], 8, 0.0, num_classes=CLASSES)

    def googlenet():
        from torchvision.models import GoogLeNet

        return GoogLeNet(num_classes=CLASSES, aux_logits=False, init_weights=False)

    class Vgg(nn.Module):
        """VGG's features; its own classifier has 100 million weights whatever the features are."""

        def __init__(self) -> None:
            super().__init__()
            from torchvision.models import vgg

            self.features = vgg.make_layers([8, "M", 16, 16, "M"], batch_norm=True)
            self.classifier = nn.Sequential(nn.Linear(16 * 16, 32), nn.ReLU(True), nn.Dropout(), nn.Linear(32, CLASSES))

        def forward(self, x):
            return self.classifier(self.features(x).flatten(1))

    class Inception(nn.Module):
        """A block of each kind that Inception has until its maps are small."""

        def __init__(self) -> None:
            super().__init__()
            from torchvision.models import inception as i

            self.stem = i.BasicConv2d(3, 16, kernel_size=3, stride=2)
            self.blocks = nn.Sequential(i.InceptionA(16, 8), i.InceptionB(232))
            self.reduce = i.BasicConv2d(712, 32, kernel_size=1)
            self.mixed = i.InceptionC(32, 16)
            self.head = nn.Linear(768, CLASSES)

        def forward(self, x):
            return self.head(self.mixed(self.reduce(self.blocks(self.stem(x)))).mean((2, 3)))

    rows: list[tuple[str, Any, int]] = [
        ("ResNet", resnet, 32), ("ConvNeXt", convnext, 32), ("MobileNetV3", mobilenet_v3, 32),
        ("EfficientNet", efficientnet, 32), ("RegNet", regnet, 32), ("DenseNet", densenet, 32),
        ("VisionTransformer", vit, 16), ("SwinTransformer", swin, 16), ("MaxVit", maxvit, 32), ("VGG", Vgg, 16),
        ("Inception", Inception, 32), ("GoogLeNet", googlenet, 32), ("MNASNet", model("mnasnet0_5"), 32),
        ("MobileNetV2", model("mobilenet_v2", width_mult=0.1), 32), ("SqueezeNet", model("squeezenet1_1"), 32),
        ("ShuffleNetV2", model("shufflenet_v2_x0_5"), 32),
    ]  # fmt: skip
    return [Specimen(f"torchvision {name}", "torchvision", make, _images(size)) for name, make, size in rows]


_SMALL_VIT = {"depth": 2, "embed_dim": 32, "num_heads": 2, "img_size": 32, "patch_size": 8}
_SMALL_MIXER = {"img_size": 32, "patch_size": 8, "num_blocks": 2, "embed_dim": 32}
_TIMM: list[tuple[str, int, dict[str, Any]]] = [
    ("deit_tiny_distilled_patch16_224", 32, _SMALL_VIT),
    ("convnextv2_atto", 64, {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 24)}),
    ("tf_efficientnetv2_b0", 32, {"channel_multiplier": 0.2, "depth_multiplier": 0.2}),
    ("xcit_nano_12_p16_224", 32, {"depth": 2, "embed_dim": 32, "num_heads": 2, "cls_attn_layers": 1}),
    ("edgenext_xx_small", 64, {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32)}),
    ("tinynet_e", 64, {}),
]


def _timm() -> list[Specimen]:
    def model(name: str, settings: dict[str, Any]):
        return lambda: importlib.import_module("timm").create_model(
            name, pretrained=False, num_classes=CLASSES, **settings
        )

    def mixer(block: str, **settings: Any):
        kind = importlib.import_module("timm.models.mlp_mixer")
        return kind.MlpMixer(num_classes=CLASSES, block_layer=getattr(kind, block), **_SMALL_MIXER, **settings)

    def poolformer():
        from timm.models.metaformer import GroupNorm1, MetaFormer, Pooling

        return MetaFormer(
            depths=(1, 1), dims=(8, 16), token_mixers=Pooling, norm_layers=GroupNorm1, num_classes=CLASSES
        )

    made = [Specimen(f"timm {name}", "timm", model(name, s), _images(size)) for name, size, s in _TIMM]
    made += [
        Specimen("timm MLP-Mixer", "timm", lambda: mixer("MixerBlock"), _images(32)),
        Specimen("timm ResMLP", "timm", lambda: mixer("ResBlock", mlp_ratio=4), _images(32)),
    ]
    return [*made, Specimen("timm PoolFormer", "timm", poolformer, _images(32))]


_IMAGE_MODELS = (
    "ViTForImageClassification BeitForImageClassification Swinv2ForImageClassification "
    "SegformerForSemanticSegmentation MobileViTForImageClassification LevitForImageClassification "
    "PvtForImageClassification"
)
_TEXT_MODELS = (
    "BertForMaskedLM RobertaForSequenceClassification DistilBertForMaskedLM AlbertForSequenceClassification "
    "ElectraForSequenceClassification MPNetForMaskedLM DebertaV2ForMaskedLM GPT2LMHeadModel GPTNeoForCausalLM "
    "OPTForCausalLM BloomForCausalLM LlamaForCausalLM MistralForCausalLM Qwen2ForCausalLM GemmaForCausalLM "
    "PhiForCausalLM ModernBertForMaskedLM"
)
_PAIRS = "T5ForConditionalGeneration BartForConditionalGeneration"
_TIED = ("BertForMaskedLM", "GPT2LMHeadModel", "BartForConditionalGeneration")  # as they are by default


def _transformers() -> list[Specimen]:
    def without_labels(name: str):
        return lambda: {n: t for n, t in ARCHITECTURES[name].batch().items() if n != "labels"}

    def pair(name: str):
        def batch() -> dict[str, torch.Tensor]:
            given = ARCHITECTURES[name].batch()
            return {**without_labels(name)(), "decoder_input_ids": given["labels"].clamp(min=0)}

        return batch

    def model(name: str):
        row = ARCHITECTURES[name]
        return dataclasses.replace(row, settings=row.settings | {"tie_word_embeddings": name in _TIED}).build

    made = [Specimen(n, "transformers", model(n), without_labels(n), text=True) for n in _TEXT_MODELS.split()]
    made += [Specimen(n, "transformers", model(n), without_labels(n)) for n in _IMAGE_MODELS.split()]
    made += [Specimen(n, "transformers", model(n), pair(n), text=True) for n in _PAIRS.split()]
    wave = "Wav2Vec2ForSequenceClassification"
    return [*made, Specimen(wave, "transformers", model(wave), without_labels(wave))]


def _all() -> dict[str, Specimen]:
    made = [*_torch(), *_torchvision(), *_timm(), *_transformers()]
    return {s.name: s for s in made if importlib.util.find_spec(s.library) is not None}


SPECIMENS = _all()
