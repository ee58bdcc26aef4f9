"""``onnxtrain doctor``: what there is on this machine, and what is missing for which feature."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
from collections.abc import Iterable, Iterator
from typing import Any

from packaging.requirements import Requirement

from onnxtrain import __version__
from onnxtrain.errors import OptionError
from onnxtrain.options import ENVIRONMENT, from_environment

_EXTRAS = ("", "torch", "onnxruntime", "transformers")
_OF_ORTMODULE = Requirement("onnxruntime>=1.26")  # tensors over DLPack


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
        part: of the report.
        name: what was looked at.
        found: what is there.
        problem: what that is in the way of; empty where of nothing.
        is_needed: whether nothing works then; else a feature is missing.
    """

    part: str
    name: str
    found: str
    problem: str = ""
    is_needed: bool = False


def add_to(commands: Any) -> None:
    """Add the command."""
    doctor = commands.add_parser(
        "doctor", help="versions, devices, compilers and settings here; status 1 if something is wrong"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=_doctor)


def _doctor(given: argparse.Namespace) -> int:
    found = examined()
    if given.json:
        print(json.dumps([dataclasses.asdict(f) for f in found], indent=1, ensure_ascii=False))
    else:
        print(_text(found))
    return int(any(f.is_needed and f.problem for f in found))


def examined() -> list[Finding]:
    """What there is on this machine."""
    return [*_machine(), *_packages(), *_devices(), *_compilers(), *_settings()]


def _text(found: Iterable[Finding]) -> str:
    lines: list[str] = []
    part = ""
    for each in found:
        if each.part != part:
            lines += ["", each.part] if lines else [each.part]
            part = each.part
        mark = "!" if each.problem and each.is_needed else "-" if each.problem else " "
        lines.append(f"{mark} {each.name:<24} {each.found}".rstrip())
        if each.problem:
            lines.append(f"  {'':<24} {each.problem}")
    return "\n".join(lines)


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("machine", "onnxtrain", __version__)
    yield Finding("machine", "Python", platform.python_version())
    yield Finding("machine", "system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield Finding("machine", "processor cores", str(cores))


def _packages() -> Iterator[Finding]:
    """What the package asks for, extra by extra; what several ask for stands where it is asked for first."""
    seen: set[str] = set()
    for extra in _EXTRAS:
        for requirement in _asked_for(extra):
            if requirement.name not in seen:
                seen.add(requirement.name)
                yield _package(requirement, extra)
    if (version := _version("onnxruntime")) and not _OF_ORTMODULE.specifier.contains(version, prereleases=True):
        problem = f'Options(backend="onnxruntime") of ORTModule needs {_OF_ORTMODULE}; artifacts do without'
        yield Finding("packages", "onnxruntime", version, problem)


def _asked_for(extra: str) -> list[Requirement]:
    try:
        texts = importlib.metadata.requires("onnxtrain") or []
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        return []
    found = map(Requirement, texts)
    plain, asked = {"extra": ""}, {"extra": extra}
    return [
        r
        for r in found
        if (not r.marker or r.marker.evaluate(asked)) and (not extra or (r.marker and not r.marker.evaluate(plain)))
    ]


def _package(requirement: Requirement, extra: str) -> Finding:
    version, wanted = _version(requirement.name), f"{requirement.name}{requirement.specifier}"
    found = version or "not installed"
    fitting = bool(version) and requirement.specifier.contains(version, prereleases=True)
    if not extra:
        problem = "" if fitting else f"onnxtrain needs {wanted}: pip install '{wanted}'"
        return Finding("packages", requirement.name, found, problem, is_needed=True)
    problem = "" if fitting else f"the extra {extra} needs {wanted}: pip install 'onnxtrain[{extra}]'"
    return Finding("packages", requirement.name, found, problem, is_needed=bool(version) and not fitting)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _devices() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is not None:
        yield from _devices_of_torch()
    if importlib.util.find_spec("onnxruntime") is not None:
        import onnxruntime

        yield Finding("devices", "onnxruntime", ", ".join(onnxruntime.get_available_providers()))


def _devices_of_torch() -> Iterator[Finding]:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    yield Finding("devices", "CPU", f"{capability}, {torch.get_num_threads()} threads of torch")
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        for index in range(torch.accelerator.device_count()):
            name = torch.cuda.get_device_name(index) if kind is not None and kind.type == "cuda" else str(kind)
            yield Finding("devices", f"accelerator {index}", name)
    else:
        built = torch.version.cuda or torch.version.hip
        problem = "torch is built for one, but sees none" if built else ""
        yield Finding("devices", "accelerator", "none", problem)


def _compilers() -> Iterator[Finding]:
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++")), "")
    problem = "" if compiler else 'Options(codegen="auto") makes no loops on the CPU'
    yield Finding("compilers", "C++", compiler or "none", problem)
    triton = _version("triton")
    yield Finding("compilers", "Triton", triton or "not installed")


def _settings() -> Iterator[Finding]:
    """The environment's variables, and what they come to."""
    known = {v.name for v in ENVIRONMENT}
    for name in sorted(n for n in os.environ if n.startswith("ORTMODULE_")):
        problem = "" if name in known else "there is no such variable: nothing reads it"
        yield Finding("settings", name, os.environ[name], problem)
    try:
        options = from_environment()
    except OptionError as error:
        yield Finding("settings", "options", "cannot be read", str(error).splitlines()[0], is_needed=True)
        return
    folder = options.cache_dir
    if folder is None:
        yield Finding("settings", "graph cache", "none: set ORTMODULE_CACHE_DIR to start without a trace")
        return
    entries = [p for p in folder.rglob("*") if p.is_file()] if folder.is_dir() else []
    used = sum(p.stat().st_size for p in entries)
    problem = "" if os.access(folder if folder.exists() else folder.parent, os.W_OK) else "it cannot be written to"
    yield Finding("settings", "graph cache", f"{folder}: {len(entries)} files, {used / 2**20:.1f} MiB", problem)
