"""Transformers architectures at toy size: the class, its kind of batch, and what its configuration needs beside."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers

BATCH, LENGTH, VOCABULARY, IMAGE = 2, 12, 99, 32

# a configuration takes those of these that it has; its parts (text, vision) too
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embedding_size": 32,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_attention_heads": 4, "num_heads": 4, "n_head": 4, "n_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "ffn_dim": 64,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_ff": 64, "d_kv": 8, "hidden_dim": 64, "n_inner": 64,
    "max_position_embeddings": 64, "n_positions": 64, "image_size": IMAGE, "patch_size": 8, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1, "projection_dim": 16, "num_labels": 3,
    "tie_word_embeddings": False, "mask_time_prob": 0.0, "mask_feature_prob": 0.0, "apply_spec_augment": False,
    "logit_scale_init_value": 1.0, "use_cache": False,
}  # fmt: skip

Batch = Callable[[], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One row.

    Args:
        model: the class in transformers.
        family: text, vision, audio, multimodal or series.
        batch: makes a batch.
        settings: what its configuration gets beside ``SIZES``.
    """

    model: str
    family: str
    batch: Batch
    settings: dict[str, Any]

    def build(self) -> torch.nn.Module:
        """The model with random weights and no dropout, in training mode."""
        kind = getattr(transformers, self.model)
        model = kind(small(kind.config_class, self.settings)).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):  # some have theirs written into the code
                module.p = 0.0
        return model


def small(config_class: Any, settings: dict[str, Any]) -> Any:
    """A configuration of toy size: every size that it has, parts too, no dropout, and the settings."""
    return config_class(**_small(config_class, settings))


def _small(config_class: Any, settings: dict[str, Any]) -> dict[str, Any]:
    default = config_class()
    given = {name: size for name, size in SIZES.items() if _has(default, name)}
    given |= {name: 0.0 for name, value in default.to_dict().items() if "drop" in name and isinstance(value, float)}
    for part, kind in getattr(default, "sub_configs", {}).items():
        inner = settings.get(part, {})
        kind = transformers.CONFIG_MAPPING[inner["model_type"]] if "model_type" in inner else kind
        if kind is not transformers.AutoConfig:
            given[part] = inner | _small(kind, inner)
    given |= {name: value for name, value in settings.items() if name not in getattr(default, "sub_configs", {})}
    return {name: value for name, value in given.items() if value is not None}


def _has(config: Any, name: str) -> bool:
    try:
        return getattr(config, name, None) is not None
    except NotImplementedError:  # a size that the model has no name for
        return False


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY - 1, shape)


def tokens() -> dict[str, Any]:
    """Token ids with a mask whose first row is padded."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[0, LENGTH - 4 :] = 0
    return {"input_ids": _ids(BATCH, LENGTH), "attention_mask": mask}


def language() -> dict[str, Any]:
    """Token ids that are their own labels."""
    given = tokens()
    return {**given, "labels": given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)}


def unpadded() -> dict[str, Any]:
    """Token ids without a mask, their own labels."""
    ids = _ids(BATCH, LENGTH)
    return {"input_ids": ids, "labels": ids.clone()}


def classified() -> dict[str, Any]:
    """Token ids with a class for each row."""
    return {**tokens(), "labels": torch.randint(0, 3, (BATCH,))}


def translated() -> dict[str, Any]:
    """Token ids with labels of another length."""
    return {**tokens(), "labels": _ids(BATCH, LENGTH - 2)}


def decoded() -> dict[str, Any]:
    """Token ids on both sides, without labels."""
    return {**tokens(), "decoder_input_ids": _ids(BATCH, LENGTH - 2)}


def pixels(size: int = IMAGE, channels: int = 3) -> dict[str, Any]:
    """Images alone."""
    return {"pixel_values": torch.randn(BATCH, channels, size, size)}


def images(size: int = IMAGE) -> dict[str, Any]:
    """Images with a class for each."""
    return {**pixels(size), "labels": torch.randint(0, 3, (BATCH,))}


def segmented(size: int = IMAGE) -> dict[str, Any]:
    """Images with a class for each pixel."""
    return {**pixels(size), "labels": torch.randint(0, 3, (BATCH, size, size))}


def videos(frames: int = 4, size: int = IMAGE) -> dict[str, Any]:
    """Videos with a class for each."""
    return {"pixel_values": torch.randn(BATCH, frames, 3, size, size), "labels": torch.randint(0, 3, (BATCH,))}


def waves(length: int = 1600) -> dict[str, Any]:
    """Raw sound with a class for each."""
    return {"input_values": torch.randn(BATCH, length), "labels": torch.randint(0, 3, (BATCH,))}


def transcribed(length: int = 1600) -> dict[str, Any]:
    """Raw sound with the characters to write down."""
    return {"input_values": torch.randn(BATCH, length), "labels": torch.randint(3, 30, (BATCH, 3))}


def spectra(bins: int = 8, frames: int = 40, last: bool = False) -> dict[str, Any]:
    """Spectra with token ids to write down; ``last``: bins are the last axis."""
    shape = (BATCH, frames, bins) if last else (BATCH, bins, frames)
    return {"input_features": torch.randn(shape), "labels": _ids(BATCH, LENGTH)}


def captioned() -> dict[str, Any]:
    """Images, each with a text, for a contrastive loss."""
    return {**tokens(), **pixels(), "return_loss": True}


def written(count: int = 0, token: int = VOCABULARY - 1) -> dict[str, Any]:
    """Images with a text to write; ``count`` places of it stand for the image."""
    given = {**tokens(), **pixels()}
    given["input_ids"] = torch.cat((torch.full((BATCH, count), token), given["input_ids"]), 1)
    given["attention_mask"] = torch.cat((torch.ones(BATCH, count, dtype=torch.int64), given["attention_mask"]), 1)
    return {**given, "labels": given["input_ids"].clone()}


def laid_out(labels: bool = True) -> dict[str, Any]:
    """Token ids with their boxes on a page."""
    corner = torch.randint(0, 400, (BATCH, LENGTH, 2))
    boxes = torch.cat((corner, corner + 100), -1)
    return {**tokens(), "bbox": boxes, **({"labels": torch.randint(0, 3, (BATCH, LENGTH))} if labels else {})}


def seen() -> dict[str, Any]:
    """Token ids with features of regions."""
    regions = torch.randn(BATCH, 5, 32)
    return {**tokens(), "visual_embeds": regions, "visual_attention_mask": torch.ones(BATCH, 5)}


def series(length: int = 32, coming: int = 8, channels: int = 2) -> dict[str, Any]:
    """Numbers that came, and those that come."""
    return {"past_values": torch.randn(BATCH, length, channels), "future_values": torch.randn(BATCH, coming, channels)}


def _row(family: str, batch: Batch, models: str, **settings: Any) -> list[Architecture]:
    return [Architecture(name, family, batch, settings) for name in models.split()]


_text = functools.partial(_row, "text")
_vision = functools.partial(_row, "vision")
_audio = functools.partial(_row, "audio")
_many = functools.partial(_row, "multimodal")
_series = functools.partial(_row, "series")
_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_local_experts": 4,
}  # fmt: skip
_CONV: dict[str, Any] = {
    "conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "vocab_size": 32, "classifier_proj_size": 16,
}  # fmt: skip
_STAGES: dict[str, Any] = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
_LONG: dict[str, Any] = {"attention_window": 4}

ARCHITECTURES: dict[str, Architecture] = {
    a.model: a
    for a in (
        *_text(
            language,
            "GPT2LMHeadModel GPTNeoXForCausalLM OPTForCausalLM BloomForCausalLM LlamaForCausalLM MistralForCausalLM "
            "Qwen2ForCausalLM Qwen3ForCausalLM GemmaForCausalLM Gemma2ForCausalLM PhiForCausalLM Phi3ForCausalLM "
            "StableLmForCausalLM Starcoder2ForCausalLM CohereForCausalLM Cohere2ForCausalLM "
            "OlmoForCausalLM Olmo2ForCausalLM GraniteForCausalLM MptForCausalLM XGLMForCausalLM BioGptForCausalLM "
            "PersimmonForCausalLM SmolLM3ForCausalLM Glm4ForCausalLM HeliumForCausalLM "
            "GPTBigCodeForCausalLM OpenAIGPTLMHeadModel "
            "CTRLLMHeadModel",
        ),
        *_text(language, "FalconForCausalLM", head_dim=None),
        *_text(language, "NemotronForCausalLM", head_dim=8, num_key_value_heads=2),
        *_text(language, "GPTJForCausalLM CodeGenForCausalLM", rotary_dim=4),
        *_text(language, "GPTNeoForCausalLM", attention_types=[[["global", "local"], 1]], num_layers=2, window_size=4),
        *_text(language, "Gemma3ForCausalLM", sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
        *_text(language, "MixtralForCausalLM OlmoeForCausalLM Qwen2MoeForCausalLM Qwen3MoeForCausalLM", **_EXPERTS),
        *_text(unpadded, "MambaForCausalLM", state_size=4, expand=2, conv_kernel=4, time_step_rank=4),
        *_text(
            language,
            "BertForMaskedLM RobertaForMaskedLM DistilBertForMaskedLM MPNetForMaskedLM "
            "RemBertForMaskedLM RoFormerForMaskedLM MegatronBertForMaskedLM "
            "RobertaPreLayerNormForMaskedLM ",
        ),
        *_text(
            classified,
            "RobertaForSequenceClassification "
            "AlbertForSequenceClassification ElectraForSequenceClassification ConvBertForSequenceClassification "
            "SqueezeBertForSequenceClassification NystromformerForSequenceClassification "
            "IBertForSequenceClassification XLMForSequenceClassification ",
            emb_dim=32,
        ),
        *_text(classified, "MobileBertForSequenceClassification", intra_bottleneck_size=32, true_hidden_size=32),
        *_text(classified, "FunnelForSequenceClassification", num_hidden_layers=None, block_sizes=[1, 1], d_head=8, d_inner=64),
        *_text(classified, "XLNetForSequenceClassification", d_inner=64, max_position_embeddings=None),
        *_text(
            language, "DebertaV2ForMaskedLM DebertaForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"]
        ),
        *_text(
            classified, "DebertaV2ForSequenceClassification", relative_attention=True, pos_att_type=["p2c", "c2p"],
        ),
        *_text(language, "ModernBertForMaskedLM", local_attention=4, cls_token_id=1, sep_token_id=2),
        *_text(language, "LongformerForMaskedLM", **_LONG),
        *_text(language, "BigBirdForMaskedLM", attention_type="original_full"),
        *_text(unpadded, "FNetForMaskedLM"),
        *_text(
            classified, "CanineForSequenceClassification", num_hash_functions=2, num_hash_buckets=64,
            local_transformer_stride=4, downsampling_rate=4,
        ),
        *_text(
            translated,
            "MT5ForConditionalGeneration BartForConditionalGeneration "
            "MBartForConditionalGeneration PegasusForConditionalGeneration MarianMTModel "
            "BlenderbotForConditionalGeneration "
            "M2M100ForConditionalGeneration UMT5ForConditionalGeneration "
            "",
        ),
        *_text(translated, "T5ForConditionalGeneration", decoder_start_token_id=0),
        *_text(
            translated, "ProphetNetForConditionalGeneration", num_hidden_layers=None, num_encoder_layers=2, num_decoder_layers=2,
            num_encoder_attention_heads=4, num_decoder_attention_heads=4, ngram=2,
        ),
        *_text(translated, "LEDForConditionalGeneration", attention_window=[4, 4]),
        *_text(translated, "LongT5ForConditionalGeneration", local_radius=3, decoder_start_token_id=0),
        *_vision(
            images,
            "ViTForImageClassification DeiTForImageClassification BeitForImageClassification "
            "Dinov2ForImageClassification ViTMSNForImageClassification Data2VecVisionForImageClassification "
            "Dinov2WithRegistersForImageClassification",
        ),
        *_vision(images, "SwinForImageClassification Swinv2ForImageClassification", patch_size=4, embed_dim=16,
                 depths=[1, 1], num_heads=[2, 2], window_size=4, hidden_size=None, num_attention_heads=None, num_layers=None,
                 num_hidden_layers=None),
        *_vision(images, "ConvNextForImageClassification ConvNextV2ForImageClassification", patch_size=4, **_STAGES),
        *_vision(images, "ResNetForImageClassification RegNetForImageClassification",
                 embedding_size=8, hidden_sizes=[32, 64], depths=[1, 1], num_stages=2, groups_width=8),
        *_vision(images, "BitForImageClassification", embedding_size=32, hidden_sizes=[128, 128], depths=[1, 1]),
        *_vision(images, "MobileNetV1ForImageClassification MobileNetV2ForImageClassification", depth_multiplier=0.25),
        *_vision(images, "EfficientNetForImageClassification", hidden_dim=320, width_coefficient=0.25,
                 depth_coefficient=0.25, num_hidden_layers=None),
        *_vision(images, "MobileViTForImageClassification", patch_size=2, hidden_sizes=[16, 24, 32],
                 neck_hidden_sizes=[8, 8, 8, 16, 16, 16, 32]),
        *_vision(lambda: images(64), "MobileViTV2ForImageClassification", patch_size=2, width_multiplier=0.25, image_size=64),
        *_vision(images, "PoolFormerForImageClassification", num_encoder_blocks=2, depths=[1, 1],
                 hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1], patch_size=16),
        *_vision(lambda: images(64), "LevitForImageClassification", hidden_sizes=[16, 24, 32], num_attention_heads=[2, 2, 2],
                 depths=[1, 1, 1], key_dim=[8, 8, 8], patch_size=16, image_size=64,
                 num_hidden_layers=None),
        *_vision(segmented, "SegformerForSemanticSegmentation", depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 16, 16],
                 num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16),
        *_vision(images, "PvtForImageClassification", depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 16, 16],
                 num_attention_heads=[1, 1, 2, 2]),
        *_vision(images, "PvtV2ForImageClassification", depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 16, 16],
                 num_attention_heads=[1, 1, 2, 2]),
        *_vision(images, "CvtForImageClassification", embed_dim=[8, 16, 32], num_heads=[1, 2, 2], depth=[1, 2, 3], patch_size=None,
                 patch_sizes=[7, 3, 3], num_hidden_layers=None, drop_rate=[0.0] * 3, attention_drop_rate=[0.0] * 3,
                 drop_path_rate=[0.0] * 3),
        *_vision(images, "FocalNetForImageClassification", patch_size=4, embed_dim=8, depths=[1, 1],
                 focal_levels=[1, 1], focal_windows=[3, 3], hidden_sizes=[8, 16]),
        *_vision(images, "HieraForImageClassification", patch_size=[7, 7], image_size=[32, 32], embed_dim=16,
                 depths=[1, 1], num_heads=[1, 2], masked_unit_size=[4, 4], patch_stride=[4, 4], num_query_pool=1,
                 query_stride=[2, 2], hidden_size=None),
        *_vision(segmented, "DPTForSemanticSegmentation", backbone_out_indices=[0, 1, 2, 3], fusion_hidden_size=16,
                 neck_hidden_sizes=[8, 8, 16, 16], is_hybrid=False, num_hidden_layers=4),
        *_vision(pixels, "YolosForObjectDetection", num_detection_tokens=4, image_size=[32, 32]),
        *_vision(videos, "VideoMAEForVideoClassification", num_frames=4),
        *_vision(videos, "TimesformerForVideoClassification VivitForVideoClassification", num_frames=4,
                 tubelet_size=[2, 8, 8]),
        *_audio(transcribed, "Wav2Vec2ForCTC", **_CONV),
        *_audio(waves, "Wav2Vec2ForSequenceClassification HubertForSequenceClassification "
                "WavLMForSequenceClassification UniSpeechForSequenceClassification "
                "UniSpeechSatForSequenceClassification Data2VecAudioForSequenceClassification", **_CONV),
        *_audio(waves, "SEWForSequenceClassification", **_CONV, squeeze_factor=2),
        *_audio(waves, "Wav2Vec2ConformerForSequenceClassification", **_CONV, conv_depthwise_kernel_size=3),
        *_audio(lambda: {"input_values": torch.randn(BATCH, 40, 16), "labels": torch.randint(0, 3, (BATCH,))},
                "ASTForAudioClassification", max_length=40, num_mel_bins=16),
        *_audio(spectra, "WhisperForConditionalGeneration", num_mel_bins=8, max_source_positions=20),
        *_audio(lambda: spectra(last=True), "Speech2TextForConditionalGeneration", input_feat_per_channel=8,
                conv_channels=16, max_source_positions=64, max_target_positions=64),
        *_audio(lambda: {"input_values": torch.randn(BATCH, 2000), "labels": _ids(BATCH, LENGTH)},
                "MoonshineForConditionalGeneration", encoder_num_hidden_layers=2, decoder_num_hidden_layers=2,
                encoder_num_attention_heads=4, decoder_num_attention_heads=4, encoder_num_key_value_heads=4,
                decoder_num_key_value_heads=4, pad_token_id=0),
        *_many(captioned, "CLIPModel SiglipModel ChineseCLIPModel AltCLIPModel"),
        *_many(lambda: {**tokens(), **pixels(), "labels": torch.rand(BATCH, 3)}, "ViltForQuestionAnswering"),
        *_many(written, "BlipForConditionalGeneration GitForCausalLM"),
        *_many(lambda: written(16), "LlavaForConditionalGeneration", image_token_index=VOCABULARY - 1,
               vision_config={"model_type": "clip_vision_model"}, text_config={"model_type": "llama"},
               vision_feature_select_strategy="default", vision_feature_layer=-1),
        *_many(lambda: written(16), "PaliGemmaForConditionalGeneration", image_token_index=VOCABULARY - 1, projection_dim=32,
               vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, "projection_dim": 32},
               text_config={"model_type": "gemma"}),
        *_many(seen, "VisualBertForPreTraining", visual_embedding_dim=32),
        *_many(laid_out, "LayoutLMForTokenClassification"),
        *_many(lambda: laid_out() | pixels(), "LayoutLMv3ForTokenClassification", input_size=IMAGE, coordinate_size=5,
               shape_size=6),
        *_many(captioned, "OwlViTModel"),
        *_series(series, "PatchTSTForPrediction PatchTSMixerForPrediction", num_input_channels=2, context_length=32,
                 prediction_length=8, patch_length=8, patch_stride=8, loss="mse"),
    )
}  # fmt: skip
