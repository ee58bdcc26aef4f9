"""The predecessor's interface: backends that are made of options, kept in a pool, and count what they run."""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from onnxtrain.errors import OptionError
from onnxtrain.options import Options
from onnxtrain.torchdynamo.piece import Piece, forget
from onnxtrain.torchdynamo.settings import check_known, settings

Providers: TypeAlias = Sequence[str | tuple[str, Mapping[str, Any]]]
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}  # what the onnxruntime backend runs on
_POOL = 8


@dataclasses.dataclass(frozen=True)
class OrtBackendOptions:
    """What may be chosen about an ``OrtBackend``.

    Args:
        preferred_execution_providers: onnxruntime's providers, best first: graphs run by onnxruntime, on the first
            that serves the device of their inputs. None runs them on the backend of ``options``.
        infer_execution_providers: whether the provider of the inputs' device is among those to choose from.
        default_execution_providers: further ones, worst.
        preallocate_output: nothing to choose: outputs are bound where onnxruntime allocates them.
        use_aot_autograd: whether gradients flow; without, graphs compute the forward pass alone.
        export_options: an object, or mapping, that says ``dynamic_shapes``: whether one graph serves all sizes that
            Dynamo calls dynamic. Operators are registered with ``register_custom_op``.
        ort_session_options: not used: a warning says so; a library of operators is ``Options.custom_op_library``.
        pre_ort_model_transforms: not used: a warning says so; ``onnxtrain.ortmodule.register_graph_optimizer`` is
            called with each training graph.
        options: our own.

    Raises:
        OptionError: a provider is none that graphs run on.
    """

    preferred_execution_providers: Providers | None = None
    infer_execution_providers: bool = True
    default_execution_providers: Providers | None = None
    preallocate_output: bool = False
    use_aot_autograd: bool = True
    export_options: Any = None
    ort_session_options: Any = None
    pre_ort_model_transforms: Sequence[Callable[..., Any]] | None = None
    options: Options | None = None

    def __post_init__(self) -> None:
        for name in ("ort_session_options", "pre_ort_model_transforms"):
            if getattr(self, name) is not None:
                warnings.warn(f"{name} is not used: sessions are made by onnxtrain", stacklevel=3)
        for name in _names(self.preferred_execution_providers) + _names(self.default_execution_providers):
            if name not in PROVIDERS.values():
                raise OptionError(
                    f"graphs do not run on the execution provider {name!r}",
                    cure=f"choose from {', '.join(PROVIDERS.values())}",
                )

    @property
    def is_dynamic(self) -> bool:
        """Whether one graph serves all sizes that Dynamo calls dynamic."""
        given = self.export_options
        said = given.get("dynamic_shapes") if isinstance(given, Mapping) else getattr(given, "dynamic_shapes", None)
        return said is None or bool(said)

    def providers(self, devices: Iterable[torch.device]) -> tuple[str, ...]:
        """The execution providers to choose from, best first: preferred, inferred, default.

        Args:
            devices: those of a graph's inputs; of its outputs where it has none.
        """
        inferred = [PROVIDERS[d.type] for d in devices if d.type in PROVIDERS] if self.infer_execution_providers else []
        rest = _names(self.default_execution_providers) or (PROVIDERS["cpu"],)
        return tuple(dict.fromkeys((*_names(self.preferred_execution_providers), *inferred, *rest)))

    def chosen(self, devices: Sequence[torch.device]) -> Options:
        """Our options for a graph on these devices.

        Raises:
            OptionError: there is no provider for the device.
        """
        options = self.options or settings()
        static = options.static_shapes or not self.is_dynamic
        if self.preferred_execution_providers is None and self.default_execution_providers is None:
            return dataclasses.replace(options, static_shapes=static)
        providers = self.providers(devices)
        missing = [d for d in devices if PROVIDERS.get(d.type) not in providers]
        if missing:
            raise OptionError(
                f"none of {', '.join(providers)} serves inputs on {missing[0]}",
                cure="move the module and the batch, or name the provider of their device",
            )
        return dataclasses.replace(options, static_shapes=static, backend="onnxruntime")


class OrtBackend:
    """A backend of ``torch.compile``: ``torch.compile(module, backend=OrtBackend(options))``.

    Args:
        options: an ``OrtBackendOptions``, or its fields, and those of ``onnxtrain.Options``, by name.

    Attributes:
        execution_count: how many calls of graphs there were.
    """

    _pool: list[OrtBackend] = []

    def __init__(self, options: OrtBackendOptions | Mapping[str, Any] | None = None) -> None:
        self.options = backend_options(options)
        self.execution_count = 0
        self.pieces: list[Piece] = []

    def __call__(self, graph: torch.fx.GraphModule, examples: Sequence[Any], **given: Any) -> Callable[..., Any]:
        """Compile what Dynamo found."""
        piece = Piece(graph, examples, self.options.chosen(devices_of(graph, examples)))
        self.pieces.append(piece)

        def run(*values: Any) -> Any:
            self.execution_count += 1
            return piece(*values)

        return run if self.options.use_aot_autograd else torch.no_grad()(run)

    compile = __call__

    def reset(self) -> None:
        """Compiled code is thrown away: ``torch._dynamo.reset`` calls this."""
        self.pieces.clear()
        forget()

    @classmethod
    def get_cached_instance_for_options(
        cls, options: OrtBackendOptions | Mapping[str, Any] | None = None
    ) -> OrtBackend:
        """The backend of the pool that has these options; a new one where there is none, or has session options."""
        wanted = backend_options(options)
        if wanted.ort_session_options is not None:
            return cls(wanted)
        found = next((backend for backend in cls._pool if backend.options == wanted), None)
        if found is None:
            found = cls(wanted)
            cls._pool[:] = [*cls._pool[1 - _POOL :], found]
        return found

    @classmethod
    def get_cached_instances(cls) -> tuple[OrtBackend, ...]:
        """The backends of the pool."""
        return tuple(cls._pool)

    @classmethod
    def clear_cached_instances(cls) -> None:
        """Empty the pool."""
        cls._pool.clear()


def onnxrt(
    graph: torch.fx.GraphModule,
    examples: Sequence[Any],
    *,
    mode: str | None = None,
    options: OrtBackendOptions | Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend under the predecessor's name: with its options, or ours.

    Args:
        graph: the graph.
        examples: what stands for its inputs.
        mode: ``torch.compile``'s.
        options: an ``OrtBackendOptions``, or its fields and those of ``onnxtrain.Options`` by name.
    """
    if options is None:
        return Piece(graph, examples, settings(mode))
    return OrtBackend.get_cached_instance_for_options(options)(graph, examples)


def is_onnxrt_backend_supported() -> bool:
    """Whether graphs can run by onnxruntime: whether it is installed."""
    return importlib.util.find_spec("onnxruntime") is not None


def backend_options(options: OrtBackendOptions | Mapping[str, Any] | None) -> OrtBackendOptions:
    """Options as an object.

    Raises:
        OptionError: a name is neither a field of ``OrtBackendOptions`` nor of ``onnxtrain.Options``.
    """
    if isinstance(options, OrtBackendOptions):
        return options
    fields = {field.name for field in dataclasses.fields(OrtBackendOptions)}
    ours = {field.name for field in dataclasses.fields(Options)}
    given = dict(options or {})
    check_known(given, fields | ours, "onnxrt", "OrtBackendOptions or of onnxtrain.Options")
    own = {name: value for name, value in given.items() if name in ours}
    theirs = {name: value for name, value in given.items() if name in fields}
    made = OrtBackendOptions(**theirs)
    return dataclasses.replace(made, options=settings(options=own)) if own else made


def devices_of(graph: torch.fx.GraphModule, examples: Sequence[Any]) -> list[torch.device]:
    """The devices of a graph's inputs, each once; of what it computes where it has no inputs (``torch.full``)."""
    made = (node.meta.get("example_value") for node in graph.graph.nodes)
    found = [x.device for x in examples if isinstance(x, torch.Tensor)]
    return list(dict.fromkeys(found or [x.device for x in made if isinstance(x, torch.Tensor)]))


def _names(providers: Providers | None) -> tuple[str, ...]:
    """Names of providers that may be given with settings of theirs."""
    return tuple(p if isinstance(p, str) else p[0] for p in providers or ())
