"""Models of timm and torchvision at toy size: one of each family of timm, each kind of model that torchvision has.

What is not installed is left out.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from libraries import load_torchvision
from torch import nn

CLASSES, BATCH, IMAGE = 8, 4, 64


@dataclasses.dataclass(frozen=True)
class ImageModel:
    """One row.

    Args:
        model: where the library has it.
        family: the library, and the part of it.
        make: makes the module.
        shape: of the images or videos of a batch.
        argument: that they are given as.
    """

    model: str
    family: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    argument: str = "x"

    def build(self) -> nn.Module:
        """The model in training mode without anything random, and with no parameter that is zero or one.

        Layers that begin as nothing, with a scale of 1e-6 or zero, would have gradients too small to compare.
        """
        module = self.make().train()
        for part in module.modules():
            is_dropout = type(part).__name__.startswith(("Dropout", "DropPath", "StochasticDepth"))
            for name in ("p", "drop_prob") if is_dropout else ("drop_rate",):
                if hasattr(part, name):
                    setattr(part, name, 0.0)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        return module

    def batch(self) -> dict[str, Any]:
        """Random images."""
        return {self.argument: torch.randn(self.shape)}


def _timm(module: str, name: str, size: int = IMAGE, batch: int = BATCH, **settings: Any) -> ImageModel:
    """A row of timm: a name of its registry, or a class where the registry's functions take no sizes."""

    def make() -> nn.Module:
        load_torchvision()  # timm imports it
        models = importlib.import_module(f"timm.models.{module}")
        return getattr(models, name)(num_classes=CLASSES, **settings)

    return ImageModel(f"timm.{module}.{name}", "timm", make, (batch, 3, size, size))


def _torchvision(
    kind: str, names: str, shape: tuple[int, ...], part: str = "", argument: str = "x", **settings: Any
) -> list[ImageModel]:
    def make(name: str) -> nn.Module:
        load_torchvision()
        models = importlib.import_module(f"torchvision.models{part}")
        return getattr(models, name)(num_classes=CLASSES, **settings)

    family = f"torchvision, {kind}"
    return [ImageModel(f"torchvision{part}.{n}", family, partial(make, n), shape, argument) for n in names.split()]


_VIT: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": IMAGE}
_FOUR: dict[str, Any] = {"depths": (1, 1, 1, 1)}
_SWIN: dict[str, Any] = {
    "img_size": IMAGE, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4),
}  # fmt: skip


def _timm_rows() -> list[ImageModel]:
    return [
        _timm("beit", "beit_base_patch16_224", **_VIT),
        _timm("byoanet", "halonet_h1", 256, 2),
        _timm("byobnet", "test_byobnet"),
        _timm("byobnet", "mobileone_s1"),
        _timm("cait", "cait_xxs24_224", **_VIT),
        _timm("coat", "coat_tiny", img_size=IMAGE, embed_dims=(32,) * 4, serial_depths=(1,) * 4, parallel_depth=1),
        _timm("convit", "convit_tiny", **{**_VIT, "depth": 3}, local_up_to_layer=2),
        _timm("convmixer", "ConvMixer", dim=32, depth=2),
        _timm("convnext", "test_convnext"),
        _timm("convnext", "convnextv2_atto", **_FOUR),
        _timm("cpubone", "cpubone_nano"),
        _timm("crossvit", "crossvit_tiny_240", img_size=240, embed_dim=(16, 32), num_heads=(2, 2), size=240),
        _timm("csatv2", "csatv2"),
        _timm("cspnet", "cs3darknet_focus_s"),
        _timm("cspnext", "cspnext_tiny"),
        _timm("davit", "davit_tiny", embed_dims=(16, 32, 32, 32), num_heads=(2, 2, 2, 2), **_FOUR),
        _timm("deepseek_vit", "deepseek_vit_412m", 84, **{**_VIT, "img_size": 84}),
        _timm("deit", "deit_tiny_distilled_patch16_224", **_VIT),
        _timm("densenet", "densenet121", growth_rate=8, block_config=(2, 2, 2)),
        _timm("dla", "dla46_c"),
        _timm("dpn", "dpn48b", k_sec=(1, 1, 1, 1)),
        _timm("edgenext", "edgenext_xx_small", depths=(1, 1, 2, 1), dims=(8, 16, 24, 32)),
        _timm("efficientformer", "efficientformer_l1", 224, 2, **_FOUR),
        _timm("efficientformer_v2", "efficientformerv2_s0", img_size=IMAGE),
        _timm("efficientnet", "test_efficientnet"),
        _timm("efficientnet", "tf_efficientnetv2_b0", channel_multiplier=0.2, depth_multiplier=0.2),
        _timm("efficientnet", "mixnet_s"),
        _timm("efficientvim", "efficientvim_m1"),
        _timm("efficientvit_mit", "efficientvit_b0"),
        _timm("efficientvit_msra", "efficientvit_m0", img_size=IMAGE),
        _timm("eva", "eva02_tiny_patch14_224", 56, **{**_VIT, "img_size": 56}),
        _timm("fasternet", "fasternet_t0", **_FOUR),
        _timm("fastvit", "fastvit_t8"),
        _timm("focalnet", "FocalNet", embed_dim=16, drop_path_rate=0.0, **_FOUR),
        _timm("gcvit", "GlobalContextVit", 128, img_size=128, embed_dim=16, num_heads=(2, 2, 2, 2), **_FOUR),
        _timm("gemma4_vit", "gemma4_vit_167m", 96, **{**_VIT, "img_size": 96}, head_dim=16, intermediate_size=64),
        _timm("ghostnet", "ghostnet_050"),
        _timm("hardcorenas", "hardcorenas_a"),
        _timm("hgnet", "hgnetv2_b0"),
        _timm(
            "hiera", "hiera_tiny_224", 64, img_size=(64, 64), embed_dim=16, stages=(1, 1, 1, 1), mask_unit_size=(4, 4)
        ),
        _timm("hieradet_sam2", "hieradet_small", embed_dim=16, stages=(1, 1, 2, 1), global_att_blocks=(3,)),
        _timm("hrnet", "hrnet_w18_small"),
        _timm("iformer", "iformer_t", depths=(1, 1, 4, 3), attn_groups=(0, 0, 1, 1)),
        _timm("inception_next", "inception_next_atto", **_FOUR),
        _timm("inception_resnet_v2", "inception_resnet_v2", 96),
        _timm("inception_v3", "inception_v3", 96),
        _timm("inception_v4", "inception_v4", 96),
        _timm("lcnetv2", "lcnetv2_small"),
        _timm("levit", "levit_128s", img_size=IMAGE),
        _timm("lowformer", "lowformer_b0"),
        _timm("mambaout", "test_mambaout"),
        _timm("maxxvit", "test_coatnet", img_size=IMAGE),
        _timm("maxxvit", "test_maxvit", img_size=IMAGE),
        _timm("metaformer", "poolformerv2_s12"),
        _timm("metaformer", "caformer_s18"),
        _timm("mlp_mixer", "MlpMixer", img_size=IMAGE, num_blocks=2, embed_dim=32),
        _timm("mlp_mixer", "resmlp_12_224", img_size=IMAGE),
        _timm("mobilenetv3", "mobilenetv3_small_050"),
        _timm("mobilenetv5", "mobilenetv5_base", 128),
        _timm("mobilevit", "mobilevit_xxs"),
        _timm("mobilevit", "mobilevitv2_050"),
        _timm("mvitv2", "mvitv2_tiny", img_size=(IMAGE, IMAGE)),
        _timm("naflexvit", "naflexvit_base_patch16_gap", embed_dim=32, depth=2, num_heads=2),
        _timm("nasnet", "nasnetalarge", 96),
        _timm("nest", "Nest", img_size=IMAGE, embed_dims=(16, 32, 32), num_heads=(2, 2, 2), depths=(1, 1, 1)),
        _timm("nextvit", "nextvit_small", depths=(1, 1, 5, 1)),
        _timm("nfnet", "test_nfnet"),
        _timm("pit", "pit_ti_224", img_size=IMAGE, depth=(1, 1, 1)),
        _timm("pnasnet", "pnasnet5large", 96),
        _timm("pvt_v2", "pvt_v2_b0", **_FOUR),
        _timm("qwen3_vit", "qwen3_vit_88m", 64, **_VIT),
        _timm("rdnet", "rdnet_tiny"),
        _timm("regnet", "regnety_002"),
        _timm("repghost", "repghostnet_050"),
        _timm("repvit", "repvit_m1"),
        _timm("res2net", "res2net50_14w_8s", layers=(1, 1, 1, 1)),
        _timm("resnest", "resnest14d"),
        _timm("resnet", "test_resnet"),
        _timm("resnetv2", "resnetv2_18", channels=(16, 32, 32, 64)),
        _timm("rexnet", "rexnet_100", width_mult=0.5),
        _timm("selecsls", "selecsls42"),
        _timm("senet", "legacy_seresnet18", layers=(1, 1, 1, 1)),
        _timm(
            "sequencer",
            "sequencer2d_s",
            img_size=IMAGE,
            layers=(1, 1, 1, 1),
            embed_dims=(32,) * 4,
            hidden_sizes=(8,) * 4,
        ),
        _timm("shvit", "shvit_s1"),
        _timm("sknet", "skresnet18", layers=(1, 1, 1, 1)),
        _timm("starnet", "starnet_s050"),
        _timm("swiftformer", "swiftformer_xs"),
        _timm("swin_transformer", "swin_tiny_patch4_window7_224", **_SWIN),
        _timm("swin_transformer_v2", "swinv2_tiny_window8_256", **_SWIN),
        _timm("swin_transformer_v2_cr", "swinv2_cr_tiny_224", **_SWIN),
        _timm("tiny_vit", "tiny_vit_5m_224", **_FOUR),
        _timm("tnt", "tnt_s_patch16_224", img_size=IMAGE, embed_dim=32, inner_dim=8, depth=2, num_heads_outer=2),
        _timm("tresnet", "tresnet_m", layers=(1, 1, 1, 1)),
        _timm("twins", "twins_svt_small", img_size=IMAGE, embed_dims=(16, 16, 32, 32), num_heads=(2, 2, 2, 2), **_FOUR),
        _timm("vgg", "vgg11_bn", mlp_ratio=0.02),
        _timm("visformer", "visformer_tiny", img_size=IMAGE),
        _timm("vision_transformer", "test_vit", img_size=IMAGE),
        _timm("vision_transformer_hybrid", "vit_tiny_r_s16_p8_224", img_size=IMAGE, embed_dim=32, depth=2, num_heads=2),
        _timm("vision_transformer_relpos", "test_vit_relpos", img_size=IMAGE),
        _timm("vision_transformer_sam", "samvit_base_patch16_224", **_VIT, global_attn_indexes=(1,), window_size=3),
        _timm("vitamin", "vitamin_small_224", img_size=IMAGE, depth=1),
        _timm("volo", "VOLO", img_size=IMAGE, layers=(1, 1, 1, 1), embed_dims=(16, 32, 32, 32), num_heads=(2, 2, 2, 2)),
        _timm("vovnet", "ese_vovnet19b_slim_dw"),
        _timm("xception", "legacy_xception"),
        _timm("xception_aligned", "xception41p"),
        _timm("xcit", "xcit_nano_12_p16_224", img_size=IMAGE, depth=2, embed_dim=32, num_heads=2, cls_attn_layers=1),
    ]


def _torchvision_rows() -> list[ImageModel]:
    """All of its models but for two of more than 600 million weights: ``regnet_y_128gf``, ``vit_h_14``."""
    images = partial(_torchvision, "classification")
    segmentation = partial(_torchvision, "segmentation", part=".segmentation", weights_backbone=None)
    video = partial(_torchvision, "video", part=".video")
    square = (BATCH, 3, IMAGE, IMAGE)
    return [
        *images("alexnet vgg11 vgg11_bn vgg13 vgg13_bn vgg16 vgg16_bn vgg19 vgg19_bn", square),
        *images("resnet18 resnet34 resnet50 resnet101 resnet152 resnext50_32x4d resnext101_32x8d", square),
        *images("resnext101_64x4d wide_resnet50_2 wide_resnet101_2", square),
        *images("densenet121 densenet161 densenet169 densenet201 squeezenet1_0 squeezenet1_1", square),
        *images("shufflenet_v2_x0_5 shufflenet_v2_x1_0 shufflenet_v2_x1_5 shufflenet_v2_x2_0", square),
        *images("mnasnet0_5 mnasnet0_75 mnasnet1_0 mnasnet1_3", square),
        *images("mobilenet_v2 mobilenet_v3_small mobilenet_v3_large", square),
        *images(
            "efficientnet_b0 efficientnet_b1 efficientnet_b2 efficientnet_b3 efficientnet_b4 efficientnet_b5", square
        ),
        *images("efficientnet_b6 efficientnet_b7 efficientnet_v2_s efficientnet_v2_m efficientnet_v2_l", square),
        *images("regnet_x_400mf regnet_x_800mf regnet_x_1_6gf regnet_x_3_2gf regnet_x_8gf regnet_x_16gf", square),
        *images("regnet_x_32gf regnet_y_400mf regnet_y_800mf regnet_y_1_6gf regnet_y_3_2gf regnet_y_8gf", square),
        *images("regnet_y_16gf regnet_y_32gf convnext_tiny convnext_small convnext_base convnext_large", square),
        *images("swin_t swin_s swin_b swin_v2_t swin_v2_s swin_v2_b", square),
        *images("googlenet", (BATCH, 3, 96, 96), init_weights=False),
        *images("inception_v3", (2, 3, 299, 299), init_weights=False),
        *images("vit_b_16 vit_b_32 vit_l_16 vit_l_32", square, image_size=IMAGE),
        *images("maxvit_t", (2, 3, 224, 224)),
        *segmentation("fcn_resnet50 fcn_resnet101", square, aux_loss=True),
        *segmentation("deeplabv3_resnet50 deeplabv3_resnet101 deeplabv3_mobilenet_v3_large", square, aux_loss=True),
        *segmentation("lraspp_mobilenet_v3_large", square, argument="input"),
        *video("r3d_18 mc3_18 r2plus1d_18", (2, 3, 4, 32, 32)),
        *video("s3d", (2, 3, 16, 224, 224)),
        *video("mvit_v1_b mvit_v2_s", (1, 3, 16, 224, 224)),
        *video("swin3d_t swin3d_s swin3d_b", (1, 3, 4, 64, 64)),
    ]


def _all() -> dict[str, ImageModel]:
    parts = {"timm": _timm_rows, "torchvision": _torchvision_rows}
    return {row.model: row for name, rows in parts.items() if importlib.util.find_spec(name) for row in rows()}


VISION = _all()
