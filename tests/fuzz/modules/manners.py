"""How people call a module and what they take out of it, around a program of tensors that is already there."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import numpy as np

from fuzz.modules.program import Argument, Program

_PACKS = {  # an expression of what is packed, and how one of it is read
    "dict": ("{{{names}}}", '{pack}["{name}"]'),
    "ordered": ("collections.OrderedDict({{{names}}})", '{pack}["{name}"]'),
    "list": ("[{values}]", "{pack}[{place}]"),
    "tuple": ("({values},)", "{pack}[{place}]"),
    "nested": ('{{"inner": [{values}], "scale": 2}}', '{pack}["inner"][{place}]'),
    "namespace": ("SimpleNamespace({keywords})", "{pack}.{name}"),
}
_WRITES = {
    "dict": ('{pack}["made"] = {value}', '{pack}.update(made={value}, again=3)', '{pack}.pop("{name}")',
             '{pack}["{name}"] = {value}', '{pack}.setdefault("made", []).append({value})'),
    "list": ("{pack}.append({value})", "{pack}[0] = {value}", "{pack}.pop()", "{pack}.insert(0, {value})",
             "{pack} += [{value}]", "{pack}.clear()"),
    "nested": ('{pack}["inner"].append({value})', '{pack}["scale"] = {value}', '{pack}["inner"] = {pack}["inner"][:1]'),
    "namespace": ("{pack}.made = {value}", "{pack}.{name} = {value}"),
}  # fmt: skip
_WRITES["ordered"] = _WRITES["dict"]
_NUMBERS = ("{value}.detach().sum().item()", "float({value}.detach().mean())", "int({value}.detach().sum() > 0)",
            "{value}.detach().flatten()[:2].tolist()", "bool({value}.detach().sum() > 0)")  # fmt: skip
_KEPT = (
    ("self.last = {number}", "self.last = None"), ("self.last = {value}.detach()", "self.last = None"),
    ("self.log.append({number})", "self.log = []"), ("self.log.append({value}.detach().mean())", "self.log = []"),
    ("self.seen['last'] = {number}", "self.seen = {}"), ("self.seen['last'] = {value}", "self.seen = {}"),
)  # fmt: skip
_FURTHER = (
    "Pair({value}, {returned})", "SimpleNamespace(out={returned}, more={value})", "({returned}, None, True, 'name')",
    "collections.OrderedDict(out={returned}, more={value})", "[({returned}, [{value}]), {{}}]",
    "({returned}, {returned})", "({returned}, x.shape[0], list({value}.shape))",
)  # fmt: skip


def dressed(program: Program, rng: np.random.Generator) -> Program:
    """The program as one of those who write such things would have it."""
    for manner, share in _MANNERS:
        if rng.random() < share:
            program = manner(program, rng)
    return program


def _packed(program: Program, rng: np.random.Generator) -> Program:
    """Arguments but the first come in a container, to which something may be written, and which may be returned."""
    packed = program.arguments[1:]
    if not packed:
        return program
    kind, pack = _one(rng, list(_PACKS)), _one(rng, ["batch", "given"])
    made, read = _PACKS[kind]
    names = ", ".join(f'"{a.name}": {a.value}' for a in packed)
    keywords = ", ".join(f"{a.name}={a.value}" for a in packed)
    value = made.format(names=names, values=", ".join(a.value for a in packed), keywords=keywords)
    reads = [f"{a.name} = {read.format(pack=pack, name=a.name, place=i)}" for i, a in enumerate(packed)]
    body, returns = [*reads, *program.body], program.returns
    if kind in _WRITES and rng.random() < 0.5:
        write = _one(rng, _WRITES[kind])
        body.append(write.format(pack=pack, name=packed[0].name, value=_value(program, rng)))
        returns = rng.choice([returns, f"({returns}, {pack})", pack], p=[0.5, 0.3, 0.2])
    argument = Argument(pack, value, bool(rng.random() < 0.3))
    return dataclasses.replace(
        program, arguments=(program.arguments[0], argument), body=tuple(body), returns=str(returns)
    )


def _kept(program: Program, rng: np.random.Generator) -> Program:
    """Something is noted on the module."""
    statement, initial = _KEPT[int(rng.integers(len(_KEPT)))]
    value = _value(program, rng)
    line = statement.format(value=value, number=_one(rng, _NUMBERS).format(value=value))
    return dataclasses.replace(program, body=(*program.body, line), initial=(*program.initial, initial))


def _of_plain_tensors(program: Program, rng: np.random.Generator) -> Program:
    """Buffers are attributes that nobody registers."""

    def plain(line: str) -> str:
        found = re.fullmatch(r"self\.register_buffer\('(\w+)', (.*?)(, persistent=False)?\)", line)
        return line if found is None else f"self.{found[1]} = {found[2]}"

    return dataclasses.replace(program, initial=tuple(map(plain, program.initial)))


def _counted(program: Program, rng: np.random.Generator) -> Program:
    """Numbers are returned beside tensors."""
    number = _one(rng, _NUMBERS).format(value=_value(program, rng))
    return dataclasses.replace(
        program, returns=_one(rng, ["({}, {})", "{{'out': {}, 'n': {}}}"]).format(program.returns, number)
    )


def _further(program: Program, rng: np.random.Generator) -> Program:
    """Other structures are returned."""
    returns = _one(rng, _FURTHER).format(returned=program.returns, value=_value(program, rng))
    return dataclasses.replace(program, returns=returns)


def _of_default_type(program: Program, rng: np.random.Generator) -> Program:
    """The type of the module is the default, and is not written."""

    def short(lines: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(line.replace(", dtype=REAL", "") for line in lines)

    return dataclasses.replace(program, body=short(program.body), initial=short(program.initial), is_default=True)


def _value(program: Program, rng: np.random.Generator) -> str:
    """A tensor that the program computes, whose name stays that tensor's."""
    found = re.findall(r"^(v\d+) = torch\.stack|^(v\d+) = \S", "\n".join(program.body), re.M)
    names = [a or b for a, b in found]
    tensors = [n for n in names if re.search(rf"\b{n}\b", program.returns)]
    return _one(rng, tensors or ["x"])


def _one(rng: np.random.Generator, of: list[str] | tuple[str, ...]) -> str:
    return str(of[int(rng.integers(len(of)))])


_MANNERS: tuple[tuple[Callable[[Program, np.random.Generator], Program], float], ...] = (
    (_of_default_type, 0.1), (_packed, 0.25), (_kept, 0.12), (_counted, 0.1), (_further, 0.12),
    (_of_plain_tensors, 0.3),
)  # fmt: skip
