"""Models of further libraries at toy size, as their pages make them.

They are written with einops, pass messages between the nodes of graphs, and see images, volumes, noise and codes.

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
from torch import Tensor, nn

CLASSES, BATCH = 10, 3
Batch = Callable[[], tuple[Any, ...]]


class Called(nn.Module):
    """A module, or a function of what a convolution makes of images, called by position."""

    def __init__(self, called: Callable[..., Any]) -> None:
        super().__init__()
        self.called = called
        self.before = None if isinstance(called, nn.Module) else nn.Conv2d(3, 3, 1)

    def forward(self, given: tuple[Any, ...]) -> Any:
        return self.called(*given) if self.before is None else self.called(self.before(*given))


@dataclasses.dataclass(frozen=True)
class OtherModel:
    """One row.

    Args:
        model: the library and its name for it.
        family: the library.
        make: makes the module.
        given: makes its arguments.
    """

    model: str
    family: str
    make: Callable[[], Callable[..., Any]]
    given: Batch

    def build(self) -> nn.Module:
        """The model in training mode, with no parameter that is zero or one."""
        module = Called(self.make()).train()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        return module

    def batch(self) -> dict[str, Any]:
        """Random arguments."""
        return {"given": self.given()}


def _images(size: int = 64, channels: int = 3, batch: int = BATCH) -> Batch:
    return lambda: (torch.randn(batch, channels, size, size),)


def _found(library: str, path: str, settings: dict[str, Any]) -> Callable[[], Any]:
    """What makes a class of a library: by its path in it."""
    module, _, name = f"{library}.{path}".rpartition(".")
    return lambda: getattr(importlib.import_module(module), name)(**settings)


def _rows(family: str, library: str, given: Batch, **settings: dict[str, Any]) -> list[OtherModel]:
    """Rows of one batch: by paths of classes, two underscores for each dot."""
    paths = [(name.replace("__", "."), chosen) for name, chosen in settings.items()]
    return [OtherModel(f"{library}.{path}", family, _found(library, path, kw), given) for path, kw in paths]


_PLAIN: dict[str, Any] = {"num_classes": CLASSES, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64}
_VIT: dict[str, Any] = {**_PLAIN, "image_size": 64, "patch_size": 16}
_STAGES: dict[str, Any] = {
    "num_classes": CLASSES, "dim": 16, "dim_conv_stem": 16, "dim_head": 8, "depth": (1, 1), "window_size": 4,
}  # fmt: skip
_CLIP: dict[str, Any] = {**_PLAIN, "image_size": 64, "image_patch_size": 16, "frames": 8, "frame_patch_size": 2}
_SERIES: dict[str, Any] = {**_PLAIN, "seq_len": 32, "patch_size": 8}


def _vit_pytorch() -> list[OtherModel]:
    rows = partial(_rows, "vit-pytorch", "vit_pytorch")
    pooled = {"kernel_size": 7, "stride": 2, "padding": 3, "pooling_kernel_size": 3, "pooling_stride": 2}
    convolved = {"img_size": (64, 64), "embedding_dim": 32, "n_conv_layers": 2, "pooling_padding": 1}
    widths = {"s1_emb_dim": 16, "s2_emb_dim": 32, "s3_emb_dim": 48}
    return [
        *rows(
            _images(),
            vit__ViT=_VIT,
            simple_vit__SimpleViT=_VIT,
            deepvit__DeepViT=_VIT,
            cait__CaiT={**_VIT, "cls_depth": 1},
            cct__CCT={**pooled, **convolved, "num_layers": 2, "num_heads": 2, "mlp_ratio": 2.0, "num_classes": CLASSES},
            cvt__CvT={**widths, "num_classes": CLASSES, "s3_depth": 1, "s2_heads": 2, "s3_heads": 2, "dropout": 0.0},
            max_vit__MaxViT=_STAGES,
            xcit__XCiT={**_VIT, "cls_depth": 1, "local_patch_kernel_size": 3},
            parallel_vit__ViT={**_VIT, "num_parallel_branches": 2},
            rvt__RvT=_VIT,
            vit_for_small_dataset__ViT=_VIT,
            learnable_memory_vit__ViT=_VIT,
            simple_vit_with_register_tokens__SimpleViT=_VIT,
            simple_vit_with_qk_norm__SimpleViT=_VIT,
            simple_vit_with_fft__SimpleViT={**_VIT, "freq_patch_size": 8},
            simple_vit_with_hyper_connections__SimpleViT={**_VIT, "num_residual_streams": 2},
            simple_vit_with_value_residual__SimpleViT=_VIT,
        ),
        *rows(_images(56), pit__PiT={**_VIT, "image_size": 56, "patch_size": 14, "depth": (1, 1, 1)}),
        *rows(lambda: (torch.randn(BATCH, 3, 8, 64, 64),), vit_3d__ViT=_CLIP, simple_vit_3d__SimpleViT=_CLIP),
        *rows(lambda: (torch.randn(BATCH, 3, 32),), vit_1d__ViT=_SERIES, simple_vit_1d__SimpleViT=_SERIES),
    ]


_ATTENTION: dict[str, dict[str, Any]] = {
    "as it is": {},
    "rotary": {"rotary_pos_emb": True},
    "alibi": {"alibi_pos_bias": True},
    "relative": {"rel_pos_bias": True},
    "gated": {"use_rmsnorm": True, "ff_glu": True, "ff_swish": True},
    "normalized": {"attn_qk_norm": True},
    "talking heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "one key": {"attn_one_kv_head": True},
    "sandwich": {"sandwich_coef": 1},
    "macaron": {"macaron": True},
    "shifted": {"shift_tokens": 1},
    "flash": {"attn_flash": True},
    "memory": {"attn_num_mem_kv": 4},
    "sparse": {"attn_sparse_topk": 4},
    "streams": {"num_residual_streams": 2},
    "laser": {"attn_laser": True},
}


def _x_transformers() -> list[OtherModel]:
    def make(kind: str, settings: dict[str, Any]) -> nn.Module:
        library = importlib.import_module("x_transformers")
        layers = getattr(library, kind)(dim=32, depth=2, heads=2, **settings)
        return library.TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=layers)

    def tokens() -> tuple[Tensor]:
        return (torch.randint(0, 50, (BATCH, 12)),)

    rows = [(f"Decoder, {name}", partial(make, "Decoder", settings)) for name, settings in _ATTENTION.items()]
    rows.append(("Encoder", partial(make, "Encoder", {})))
    return [OtherModel(f"x_transformers.{name}", "x-transformers", make, tokens) for name, make in rows]


def _graphs() -> list[OtherModel]:
    """Layers and networks of PyTorch Geometric."""

    def graph() -> tuple[Tensor, Tensor]:
        return torch.randn(9, 8), torch.randint(0, 9, (2, 27))

    plain: dict[str, Any] = {"in_channels": 8, "out_channels": 8}
    layers = """GCNConv SAGEConv GATConv GATv2Conv GraphConv TransformerConv ARMAConv TAGConv SGConv LEConv
        ClusterGCNConv FeaStConv ResGatedGraphConv GeneralConv"""
    chosen: dict[str, dict[str, Any]] = {f"nn__{name}": plain for name in layers.split()}
    chosen |= {"nn__ChebConv": {**plain, "K": 3}, "nn__FAConv": {"channels": 8}}
    deep = {"in_channels": 8, "hidden_channels": 16, "num_layers": 2, "out_channels": 4}
    chosen |= {f"nn__{name}": deep for name in ("GCN", "GAT", "GIN", "GraphSAGE")}
    return _rows("PyTorch Geometric", "torch_geometric", graph, **chosen)


def _diffusers() -> list[OtherModel]:
    rows, blocks = partial(_rows, "diffusers", "diffusers"), {"block_out_channels": (32, 32), "norm_num_groups": 8}

    def at(*shape: int) -> tuple[Tensor, Tensor]:
        return torch.randn(BATCH, *shape), torch.full((BATCH,), 5)

    crossed = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 16,
        "attention_head_dim": 8,
    }
    plain = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    coded = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    tiles = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "patch_size": 2}
    small = {"sample_size": 16, "layers_per_block": 1}
    return [
        *rows(lambda: at(3, 16, 16), UNet2DModel={**blocks, **plain, **small}),
        *rows(
            lambda: (*at(4, 8, 8), torch.randn(BATCH, 6, 16)),
            UNet2DConditionModel={**blocks, **crossed, **small, "sample_size": 8},
        ),
        *rows(_images(16), VQModel={**blocks, **coded, "sample_size": 16, "num_vq_embeddings": 16}),
        *rows(
            lambda: (*at(4, 8, 8), torch.full((BATCH,), 1)),
            DiTTransformer2DModel={**tiles, "in_channels": 4, "num_embeds_ada_norm": 10, "norm_num_groups": 4},
        ),
    ]


def _monai() -> list[OtherModel]:
    rows = partial(_rows, "MONAI", "monai.networks.nets")
    flat: dict[str, Any] = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
    tower: dict[str, Any] = {"channels": (8, 16, 32), "strides": (2, 2)}
    solid = {**flat, "spatial_dims": 3, "kernel_size": [3] * 3, "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]}
    sized: dict[str, Any] = {"in_channels": 1, "img_size": (32, 32), "mlp_dim": 32, "num_heads": 2, "spatial_dims": 2}
    return [
        *rows(
            _images(32, 1),
            UNet={**flat, **tower, "num_res_units": 1},
            AttentionUnet={**flat, **tower},
            SegResNet={**flat, "init_filters": 8, "blocks_down": (1, 1), "blocks_up": (1,)},
            VNet=flat,
            BasicUNet={**flat, "features": (8, 8, 16, 16, 32, 8)},
            UNETR={**sized, "out_channels": 2, "feature_size": 8, "hidden_size": 24},
            DenseNet={**flat, "init_features": 8, "growth_rate": 4, "block_config": (2, 2)},
            HighResNet=flat,
            AutoEncoder={**flat, "channels": (8, 16), "strides": (2, 2)},
        ),
        *rows(lambda: (torch.randn(2, 1, 8, 8, 8),), DynUNet=solid),
    ]


def _segmentation() -> list[OtherModel]:
    rows = partial(_rows, "segmentation-models", "segmentation_models_pytorch")
    names = "Unet UnetPlusPlus FPN PSPNet DeepLabV3 DeepLabV3Plus Linknet MAnet UPerNet Segformer"
    settings: dict[str, Any] = {"encoder_name": "resnet18", "encoder_weights": None, "classes": 2}
    return [
        *rows(_images(batch=2), **dict.fromkeys(names.split(), settings)),
        *rows(_images(128, batch=2), PAN=settings),
    ]


def _codes() -> list[OtherModel]:
    coded: dict[str, Any] = {"dim": 8, "codebook_size": 16}
    return _rows(
        "vector-quantize",
        "vector_quantize_pytorch",
        lambda: (torch.randn(BATCH, 6, 8),),
        FSQ={"levels": [4, 4, 4], "dim": 8},
        LFQ=coded,
        SimVQ=coded,
    )


def _kornia() -> list[OtherModel]:
    def row(name: str, *arguments: Any, **named: Any) -> OtherModel:
        part, _, function = name.rpartition(".")

        def make() -> Callable[..., Any]:
            called = getattr(importlib.import_module(f"kornia.{part}"), function)
            return lambda images: called(images.sigmoid(), *arguments, **named)

        return OtherModel(f"kornia.{name}", "kornia", make, _images(16))

    return [
        row("filters.gaussian_blur2d", (3, 3), (1.0, 1.0)),
        row("filters.sobel"),
        row("filters.laplacian", 3),
        row("filters.median_blur", (3, 3)),
        row("filters.unsharp_mask", (3, 3), (1.0, 1.0)),
        row("losses.total_variation"),
        row("geometry.pyrdown"),
        row("color.rgb_to_hsv"),
        row("color.rgb_to_lab"),
        row("feature.harris_response"),
    ]


_LIBRARIES: dict[str, Callable[[], list[OtherModel]]] = {
    "vit_pytorch": _vit_pytorch,
    "x_transformers": _x_transformers,
    "torch_geometric": _graphs,
    "diffusers": _diffusers,
    "monai": _monai,
    "segmentation_models_pytorch": _segmentation,
    "vector_quantize_pytorch": _codes,
    "kornia": _kornia,
}
OTHERS = {
    row.model: row for name, rows in _LIBRARIES.items() if importlib.util.find_spec(name) is not None for row in rows()
}
