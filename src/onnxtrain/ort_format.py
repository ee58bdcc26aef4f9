"""Models in onnxruntime's own format, ``.ort``, which its smaller builds read; no torch."""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from onnxtrain.errors import ArtifactError, first_line
from onnxtrain.portable import write_atomically

_LOG = logging.getLogger(__name__)


class OptimizationStyle(enum.Enum):
    """When a model in this format is optimized.

    ``Fixed``: now. ``Runtime``: as far as any device allows now, and further by the session that loads it.
    """

    Fixed = 0
    Runtime = 1


def convert_onnx_models_to_ort(
    model_path_or_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str] | None = None,
    optimization_styles: Sequence[OptimizationStyle] | None = None,
    custom_op_library_path: str | os.PathLike[str] | None = None,
    target_platform: str | None = None,
    save_optimized_onnx_model: bool = False,
    allow_conversion_failures: bool = False,
    enable_type_reduction: bool = False,
) -> list[Path]:
    """Write ``.ort`` twins of ``.onnx`` files, and the operators they need as a ``.config`` file.

    Signature and names of the files are those of the tool that onnxruntime has. A Dropout in training mode stays one,
    which the tool removes: artifacts train the same in either format.

    Args:
        model_path_or_dir: a file, or a folder of which all ``.onnx`` files are converted.
        output_dir: where files go, in the folders they have below the given one; beside the models by default.
        optimization_styles: one file each, ``.ort`` and ``.with_runtime_opt.ort``; None is ``Fixed``.
        custom_op_library_path: library of the models' custom operators.
        target_platform: ``"arm"`` lets int8 be computed as such beside QuantizeLinear.
        save_optimized_onnx_model: also write ``.optimized.onnx``, to look at what became of the model.
        allow_conversion_failures: say what cannot be converted as a warning, and go on.
        enable_type_reduction: write which types the operators need, too.

    Returns:
        The ``.ort`` files.

    Raises:
        ArtifactError: there is no such file, or one cannot be converted.
    """
    source = Path(model_path_or_dir).resolve()
    folder = source if source.is_dir() else source.parent
    out = folder if output_dir is None else Path(output_dir).resolve()
    models = [*_models(source)]
    if not models:
        raise ArtifactError(f"{source} is no .onnx file, nor a folder of some", cure="give the path of a model")
    written: list[Path] = []
    for style in optimization_styles or [OptimizationStyle.Fixed]:
        suffix = ".with_runtime_opt" if style is OptimizationStyle.Runtime else ""
        made: list[Path] = []
        for model in models:
            target = (out / model.relative_to(folder)).with_suffix(f"{suffix}.ort")
            options = {"at_load": style is OptimizationStyle.Runtime, "integers": target_platform == "arm"}
            try:
                _convert(model, target, custom_op_library_path, options, save_optimized_onnx_model)
                made.append(target)
            except Exception as error:  # onnxruntime raises many types
                what = f"{model} cannot be converted: {first_line(error)}"
                if not allow_conversion_failures:
                    raise ArtifactError(what, cure="give a model that onnxruntime runs") from error
                _LOG.warning("%s", what)
        config = f"required_operators{'_and_types' if enable_type_reduction else ''}{suffix}.config"
        _note(made, out / (config if source.is_dir() else f"{source.stem}.{config}"), enable_type_reduction)
        written += made
    return written


def _models(source: Path) -> Iterator[Path]:
    """The file, or the ``.onnx`` files of the folder that this did not write."""
    for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
        if path.is_file() and path.suffix.lower() == ".onnx" and not path.name.endswith(".optimized.onnx"):
            yield path


def _convert(
    model: Path, target: Path, library: str | os.PathLike[str] | None, options: dict[str, bool], to_look_at: bool
) -> None:
    from onnxtrain.execute.onnxruntime import to_ort_format

    content = model.read_bytes()
    if to_look_at:
        write_atomically(
            target.with_suffix(".optimized.onnx"), to_ort_format(content, library, **options, as_onnx=True)
        )
    write_atomically(target, to_ort_format(content, library, **options))


def _note(models: Sequence[Path], path: Path, types: bool) -> None:
    from onnxtrain.execute.onnxruntime import write_needed_operators

    if models:
        write_needed_operators(models, path, types)
