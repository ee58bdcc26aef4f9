"""Options of one compilation, and the one table of environment variables."""

from __future__ import annotations

import dataclasses
import enum
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from onnxtrain import memory_options
from onnxtrain.errors import OptionError
from onnxtrain.option_values import as_declared, truth_of

BACKENDS = ("auto", "torch", "onnxruntime", "reference")
DEVINFO = 15  # of logging: between Python's DEBUG and INFO
LOG_LEVELS = ("VERBOSE", "DEVINFO", "INFO", "WARNING", "ERROR", "FATAL")
OPSETS = (20, 21)
HOOKS = ("auto", "error", "trace")
CODEGENS = ("none", "auto", "inductor")
CONV_SEARCHES = ("HEURISTIC", "EXHAUSTIVE")
CAST_LEVELS = (-1, 0, 1, 2)


class PropagateCastOpsStrategy(enum.StrEnum):
    """How casts move, as ``Options`` takes it; the names are those of onnxruntime-training."""

    NONE = "NONE"
    INSERT_AND_REDUCE = "INSERT_AND_REDUCE"
    FLOOD_FILL = "FLOOD_FILL"


CAST_STRATEGIES = tuple(PropagateCastOpsStrategy)


class Fallback(enum.Flag):
    """Which failures make a module run in eager PyTorch instead; the names are those of onnxruntime-training."""

    FALLBACK_DISABLE = 1
    FALLBACK_FORCE_TORCH_FORWARD = 2
    FALLBACK_FORCE_TORCH_BACKWARD = 4
    FALLBACK_UNSUPPORTED_DEVICE = 8
    FALLBACK_UNSUPPORTED_DATA = 16
    FALLBACK_UNSUPPORTED_TORCH_MODEL = 32
    FALLBACK_UNSUPPORTED_ONNX_MODEL = 64
    FALLBACK_BAD_INITIALIZATION = 128


_EAGER = ~Fallback.FALLBACK_DISABLE
_SKIP_CHECKS = ("SKIP_CHECK_DISABLED", "SKIP_CHECK_DEVICE", "SKIP_CHECK_BUILD_GRADIENT", "SKIP_CHECK_EXECUTION_AGENT")


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user may choose about one compilation; immutable, so it can be part of a cache key.

    Args:
        backend: ``"auto"`` (torch where it is installed), ``"torch"``, ``"onnxruntime"`` or ``"reference"``.
        opset: ONNX opset of the graph, 20 or 21.
        verify: compare the first training step of every new graph with eager PyTorch.
        verify_passes: run ``ir.verify`` after every pass.
        fallback: ``"error"`` (a failure is an error), ``"eager"`` (any failure runs in eager PyTorch, announced once
            with its reason), or names of ``Fallback`` policies joined by ``|``.
        fallback_retry: after a fallback try the graph again at the next step, rather than stay in eager PyTorch.
        hooks: which forward hooks of submodules become part of the graph: ``"auto"``, those that by their code only
            compute on tensors or set flags of them; ``"trace"``, all, because you know that they do; ``"error"``, none.
        custom_autograd: each call of a ``torch.autograd.Function`` is a node that runs the class; else an error.
        keep_checkpoints: reentrant gradient checkpoints stay as they are and run in eager PyTorch; else their content
            is part of the graph.
        static_shapes: capture the sizes of the first call as constants: one graph for each combination of sizes.
        cache_casts: keep parameters that an optimizer of torch has stepped in the dtype that autocast wants them in
            until they change: gradient accumulation then casts once for all its steps. What is written through
            ``p.data`` between the backward passes of one accumulation is not seen.
        propagate_cast_ops_strategy: how casts move so that more runs in half precision: ``"FLOOD_FILL"`` (node by
            node), ``"INSERT_AND_REDUCE"`` (all nodes that hang together at once), or ``"NONE"``.
        propagate_cast_ops_level: the operators that they move over: -1 none, 0 those of ``propagate_cast_ops_allow``,
            1 also those that do no arithmetic, which keeps every bit, 2 also those that half precision is enough for.
        propagate_cast_ops_allow: names of further operators, at every level but -1; they then compute in half.
        deterministic: only kernels that give the same bits each time; ORTModule follows torch's own switch.
        ignored_attributes: names of attributes of the module, or global ones, whose changes do not concern its forward
            pass.
        conv_algo_search: how cuDNN chooses convolution algorithms in onnxruntime, ``"HEURISTIC"`` or ``"EXHAUSTIVE"``.
        codegen: what runs operators that go through the same rows one after the other: ``"none"``, for each a kernel of
            ATen; ``"auto"``, once Inductor has made one loop of them, in a process of its own, the loop, where it turns
            out faster; ``"inductor"``, always the loop, which is waited for. Rounding may differ from eager's in the
            last places. Without effect with ``memory_budget`` or ``deterministic``, and on other backends.
        custom_op_library: library of custom operators that sessions of the onnxruntime backend load.
        compute_optimizer: skip work that nothing visible depends on; off turns off all that follows.
        sparse_optimizer: compute only rows that matter, such as those with a label; needs ``compute_optimizer``.
        embedding_sparse_optimizer: leave padding out of everything; needs ``sparse_optimizer``.
        strict: outputs at padded positions are what eager computes there, so padding that they show is computed; else
            they are zeros where rows were dropped.
        lazy_outputs: outputs beside a loss (logits) are computed when they are first read.
        density_threshold: rows are dropped where a smaller share than this is needed; None weighs what they cost
            against what it costs to pack them.
        memory_budget: bytes that forward and backward of a step may have in use at once beside weights and inputs,
            gradients included: a number, text such as ``"6GB"`` or ``"512MiB"``, a share such as ``0.5`` of what a
            step needs without a budget, or ``"min"``, as few as possible. What does not fit is not saved for the
            backward pass but computed again there.
        memory_offload: where saved values may wait for the backward pass if a budget asks for it: ``"host"`` for the
            host's memory, where an accelerator runs the step, or a folder for files; None for nowhere.
        worst_case: shapes of inputs by name, such as ``{"input_ids": (32, 512)}``, that the budget is planned for; a
            larger batch than the first one is planned for when it comes.
        memory_plans: what is computed again, by hand instead of by a budget: ``("Linear+Gelu+:1:-1",)``, the same as
            one text with commas, or the path of a .json file; ``explain("memory")`` lists what there is.
        memory_level: 0 those plans; instead of them 1 all that there are between the inputs of a transformer's layers,
            2 also those for which something smaller is kept.
        memory_probe: how far plans are looked for, ``"level:boundary"``: level 0 over cheap operators, 1 also over
            products, normalizations and attention; boundary 1 not beyond the input of a layer.
        keep_freed: what a step frees of the host's memory stays with the process for the next step; else glibc gives
            much of it back to the system, which hands it out anew, page by page, at every step.
        segments: into how many parts at most the backward pass is cut, so that gradients, and hooks on them, do not
            wait for the rest of it; None takes as many as do not show in the time of a step, and ``"all"`` as many as
            there can be, which None does, too, where hooks take gradients when they are there (``step_in_backward``).
        print_input_density: print the share of needed rows of each step.
        print_memory_stats: print the memory in use before and after each forward and backward pass, and the prediction.
        cache_dir: folder that keeps translated graphs for the next process; None keeps nothing.
        cache_limit: bytes that this folder may take.
        cache_verify: trace although the folder has the graph of a call, and compare.
        save_onnx: folder that receives one ``.onnx`` file for each stage; None saves nothing.
        onnx_prefix: how the names of these files begin.
        log_level: one of ``LOG_LEVELS``.
        summary: say after the first training step what is in force and what the start cost.

    Raises:
        OptionError: a value is outside its list.
    """

    backend: str = "auto"
    opset: int = 20
    verify: bool = False
    verify_passes: bool = True
    fallback: str = "error"
    fallback_retry: bool = False
    hooks: str = "auto"
    custom_autograd: bool = True
    keep_checkpoints: bool = False
    static_shapes: bool = False
    cache_casts: bool = False
    propagate_cast_ops_strategy: str = "FLOOD_FILL"
    propagate_cast_ops_level: int = 1
    propagate_cast_ops_allow: tuple[str, ...] = ()
    deterministic: bool = False
    ignored_attributes: tuple[str, ...] = ()
    conv_algo_search: str = "HEURISTIC"
    codegen: str = "none"
    custom_op_library: Path | None = None
    compute_optimizer: bool = True
    sparse_optimizer: bool = True
    embedding_sparse_optimizer: bool = True
    strict: bool = False
    lazy_outputs: bool = True
    density_threshold: float | None = None
    memory_budget: int | float | str | None = None
    memory_offload: str | None = None
    worst_case: Mapping[str, tuple[int, ...]] | None = None
    memory_plans: str | Path | tuple[str, ...] = ()
    memory_level: int = 0
    memory_probe: str = "1:0"
    keep_freed: bool = True
    segments: int | str | None = None
    print_input_density: bool = False
    print_memory_stats: bool = False
    cache_dir: Path | None = None
    cache_limit: int = 2**30
    cache_verify: bool = False
    save_onnx: Path | None = None
    onnx_prefix: str = ""
    log_level: str = "WARNING"
    summary: bool = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, as_declared(field.name, str(field.type), getattr(self, field.name)))
        lists = (
            ("backend", BACKENDS),
            ("opset", OPSETS),
            ("log_level", LOG_LEVELS),
            ("hooks", HOOKS),
            ("conv_algo_search", CONV_SEARCHES),
            ("codegen", CODEGENS),
            ("propagate_cast_ops_strategy", CAST_STRATEGIES),
            ("propagate_cast_ops_level", CAST_LEVELS),
            ("memory_level", memory_options.LEVELS),
        )
        for name, allowed in lists:
            if getattr(self, name) not in allowed:
                raise OptionError(
                    f"{name}={getattr(self, name)!r} is not known", cure=f"choose one of {', '.join(map(str, allowed))}"
                )
        if self.cache_limit <= 0:
            raise OptionError(f"cache_limit={self.cache_limit} is not a number of bytes", cure="choose a positive one")
        if self.segments not in (None, "all") and not (type(self.segments) is int and self.segments > 0):
            raise OptionError(f"segments={self.segments!r} is not a number of parts", cure="choose 1 to cut nothing")
        if self.density_threshold is not None and not 0.0 <= self.density_threshold <= 1.0:
            raise OptionError(
                f"density_threshold={self.density_threshold} is not a share",
                cure="choose one from 0 to 1; 0 drops none",
            )
        object.__setattr__(self, "memory_budget", memory_options.budget_of(self.memory_budget))
        if self.worst_case is not None:
            object.__setattr__(self, "worst_case", memory_options.WorstCase(self.worst_case))
        object.__setattr__(self, "memory_plans", memory_options.plans_of(self.memory_plans))
        object.__setattr__(self, "memory_probe", memory_options.probe_of(self.memory_probe))
        memory_options.one_way(self.memory_budget, self.plans_by_hand, self.memory_level)
        memory_options.check_offload(self.memory_offload, self.memory_budget, self.backend)
        _ = self.policy

    @property
    def offload_folder(self) -> str:
        """The folder of files for saved values; empty where they wait in the host's memory, if anywhere."""
        return "" if self.memory_offload in (None, "host") else str(self.memory_offload)

    @property
    def drops_rows(self) -> bool:
        """Whether rows that do not matter may be dropped."""
        return self.compute_optimizer and self.sparse_optimizer

    @property
    def padding_elimination(self) -> bool:
        """Whether padding may be left out."""
        return self.drops_rows and self.embedding_sparse_optimizer

    @property
    def plans_by_hand(self) -> tuple[str, ...]:
        """The memory plans, each in a text of its own."""
        assert isinstance(self.memory_plans, tuple)
        return self.memory_plans

    @property
    def of_gradient(self) -> Options:
        """The options of a backward pass that is a graph of its own; its dumps stand beside the first one's."""
        prefix = "_".join(filter(None, (self.onnx_prefix, "gradient")))
        plain = {"compute_optimizer": False, "cache_casts": False, "memory_plans": (), "memory_level": 0}
        return dataclasses.replace(self, **plain, onnx_prefix=prefix)

    @property
    def policy(self) -> Fallback:
        """The fallback policies in force; ``FALLBACK_DISABLE`` among them turns all off."""
        if self.fallback in ("error", "eager"):
            return Fallback.FALLBACK_DISABLE if self.fallback == "error" else _EAGER
        names = [name.strip() for name in self.fallback.split("|")]
        known = Fallback.__members__
        if unknown := [name for name in names if name not in known]:
            raise OptionError(
                f"fallback={self.fallback!r}: {unknown[0]!r} is not known",
                cure=f"choose 'error', 'eager', or names of {', '.join(known)} joined by |",
            )
        chosen = Fallback(0)
        for name in names:
            chosen |= known[name]
        return Fallback.FALLBACK_DISABLE if Fallback.FALLBACK_DISABLE in chosen else chosen


def _all_segments(text: str) -> str | None:
    return "all" if truth_of(text) else None


def _codegen(text: str) -> str:
    return "auto" if truth_of(text) else "none"


def _conv_search(text: str) -> str:
    if text.upper() in CONV_SEARCHES:
        return text.upper()
    warnings.warn(f"{text!r} is none of {', '.join(CONV_SEARCHES)}: HEURISTIC is taken", stacklevel=2)
    return "HEURISTIC"


def _skip_checks(text: str) -> None:
    for name in text.split("|"):
        if name.strip() not in _SKIP_CHECKS:
            raise ValueError(f"{name!r} is none of {', '.join(_SKIP_CHECKS)}")


@dataclasses.dataclass(frozen=True)
class Variable:
    """One environment variable.

    Args:
        name: the variable.
        read: makes the option's value of its text.
        option: the option it sets; empty where it only has to be readable, because there is nothing left to choose.
        note: what it does, or why it does nothing.
    """

    name: str
    read: Callable[[str], Any]
    option: str = ""
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Missing:
    """An environment variable whose feature is not built yet: any text but those of ``off`` is an error."""

    name: str
    off: tuple[str, ...] = ("0", "false", "no", "off")


_ATTENTION = "nothing to choose: taken on CUDA where it fits, but after torch.backends.cuda."

ENVIRONMENT: tuple[Variable | Missing, ...] = (
    Variable("ORTMODULE_ONNX_OPSET_VERSION", int, "opset", "opset of the graph"),
    Variable("ORTMODULE_CONV_ALGO_SEARCH", _conv_search, "conv_algo_search", "HEURISTIC or EXHAUSTIVE"),
    Variable("ORTMODULE_FALLBACK_POLICY", str, "fallback", "policy names joined by |; FALLBACK_DISABLE turns all off"),
    Variable("ORTMODULE_FALLBACK_RETRY", truth_of, "fallback_retry", "1: try the graph again at the next step"),
    Variable("ORTMODULE_LOG_LEVEL", str.upper, "log_level", "overrides DebugOptions"),
    Variable("ORTMODULE_SAVE_ONNX_PATH", Path, "save_onnx", "folder of the dumps"),
    Variable("ORTMODULE_CACHE_DIR", Path, "cache_dir", "folder of translated graphs"),
    Variable("ORTMODULE_CACHE_VERIFY", truth_of, "cache_verify", "1: trace and compare although there is a graph"),
    Variable("ORTMODULE_SKIPCHECK_POLICY", _skip_checks, note="nothing to choose: no check is skipped"),
    Variable("ORTMODULE_DEEPCOPY_BEFORE_MODEL_EXPORT", truth_of, note="nothing to choose: there is no probing run"),
    Variable("ORTMODULE_ENABLE_CUSTOM_AUTOGRAD", truth_of, "custom_autograd", "0: torch.autograd.Function is an error"),
    Variable("ORTMODULE_ALLOW_AUTOGRAD_CHECKPOINT", truth_of, "keep_checkpoints", "1: checkpoints stay as they are"),
    Variable("ORTMODULE_SKIPPED_AUTOGRAD_FUNCTIONS", str, note="nothing to skip: names do not clash"),
    Variable("ORTMODULE_ROCM_TEST", str, note="of the predecessor's own tests"),
    Variable("ORTMODULE_ENABLE_COMPUTE_OPTIMIZER", truth_of, "compute_optimizer", "0: nothing is skipped"),
    Variable("ORTMODULE_ENABLE_SPARSE_OPTIMIZER", truth_of, "sparse_optimizer", "0: all rows are computed"),
    Variable(
        "ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER", truth_of, "embedding_sparse_optimizer", "0: padding is computed"
    ),
    Variable("ORTMODULE_PRINT_INPUT_DENSITY", truth_of, "print_input_density", "1: print each step's density"),
    Variable("ORTMODULE_PRINT_MEMORY_STATS", truth_of, "print_memory_stats", "1: print memory at the phases of a step"),
    Variable("ORTMODULE_ENABLE_MEMORY_ALLEVIATION", memory_options.plans_of, "memory_plans", "as the next one"),
    Variable("ORTMODULE_MEMORY_OPT_CONFIG", memory_options.plans_of, "memory_plans", "Gelu+:1:-1,..., or a .json file"),
    Variable("ORTMODULE_MEMORY_OPT_LEVEL", int, "memory_level", "0 those plans, 1 all of a layer, 2 with compromise"),
    Variable(
        "ORTMODULE_MEMORY_OPT_PROBE_RECOMPUTE_LEVEL", memory_options.probe_of_level, "memory_probe", "its level alone"
    ),
    Variable("ORTMODULE_MEMORY_OPT_PROBE_RECOMPUTE_CONFIG", memory_options.probe_of, "memory_probe", "level:boundary"),
    Variable("ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT", _all_segments, "segments", 'of the backward pass, 1: "all"'),
    Variable("ORTMODULE_USE_TRITON", _codegen, "codegen", '1: "auto"'),
    Missing("ORTMODULE_TRITON_CONFIG_FILE", ()),
    Missing("ORTMODULE_TRITON_DEBUG"),
    Missing("ORTMODULE_ENABLE_TUNING"),
    Missing("ORTMODULE_MAX_TUNING_DURATION_MS"),
    Missing("ORTMODULE_TUNING_RESULTS_PATH", ()),
    Variable("ORTMODULE_USE_EFFICIENT_ATTENTION", truth_of, note=f"{_ATTENTION}enable_mem_efficient_sdp(False)"),
    Variable("ORTMODULE_USE_FLASH_ATTENTION", truth_of, note=f"{_ATTENTION}enable_flash_sdp(False)"),
    Variable("ORTMODULE_ENABLE_ZERO_STAGE3", truth_of, note="nothing to choose: DeepSpeed's stage 3 works"),
)


def from_environment(options: Options | None = None, environ: Mapping[str, str] | None = None) -> Options:
    """Options after the second phase: defaults first, then code and JSON, then the environment, which wins.

    Raises:
        OptionError: a variable's text cannot be read, or asks for a feature that is not built yet.
    """
    environ = os.environ if environ is None else environ
    changes: dict[str, Any] = {}
    for variable in ENVIRONMENT:
        text = environ.get(variable.name, "").strip()
        if text and isinstance(variable, Missing):
            if text.lower() not in variable.off:
                raise not_available(variable.name, text)
        elif text and isinstance(variable, Variable):
            value = _read(variable, text)
            if variable.option:
                changes[variable.option] = value
    options = options or Options()
    if options.save_onnx is None:
        changes.pop("save_onnx", None)  # the variable says where dumps go, not that there are any
    return dataclasses.replace(options, **changes)


def _read(variable: Variable, text: str) -> Any:
    try:
        return variable.read(text)
    except ValueError as error:
        raise OptionError(f"{variable.name}={text!r} cannot be read: {error}") from error


def not_available(name: str, value: Any) -> OptionError:
    """The error for a setting whose feature is not built yet."""
    return OptionError(f"{name}={value} is not available yet", cure=f"remove {name}, or turn it off")


def json_config_path(path: str | os.PathLike[str] | None, environ: Mapping[str, str] | None = None) -> Path:
    """The JSON configuration to read: ``ORTMODULE_JSON_CONFIG_PATH`` takes precedence over the argument.

    Raises:
        OptionError: neither is given.
    """
    chosen = (os.environ if environ is None else environ).get("ORTMODULE_JSON_CONFIG_PATH", "") or path
    if not chosen:
        raise OptionError("there is no JSON configuration", cure="pass path, or set ORTMODULE_JSON_CONFIG_PATH")
    return Path(chosen)
