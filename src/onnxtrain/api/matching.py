"""Models and states that are used together are of one set, or at least of the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx

from onnxtrain.api.checkpoint_state import CheckpointState
from onnxtrain.checkpoint import Form
from onnxtrain.errors import ArtifactError, CheckpointError, close_to

_SAME = "use files of the same call of generate_artifacts"


def form_of(value: onnx.ValueInfoProto) -> Form:
    """Element type and shape of a model's input whose sizes are numbers."""
    kind = value.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
    return Form(dtype.name, tuple(d.dim_value for d in kind.shape.dim))


def match_state(state: CheckpointState, facts: Mapping[str, Any], proto: onnx.ModelProto, name: str) -> None:
    """Check that a state is of the set of a training model, which it is from then on, and has its parameters.

    These are all of the model's and no other, of the same types and shapes, trained or not.

    Raises:
        CheckpointError: else.
    """
    cure = "use the checkpoint of these artifacts"
    known = facts.get("set", "")
    if known and state.set_id and known != state.set_id:
        what = f"{name} is of the set {known[:12]}, {state.name} of the set {state.set_id[:12]}"
        weights = "CheckpointState.load_checkpoint(path, of_any_set=True) takes its weights nevertheless"
        raise CheckpointError(what, cure=f"{_SAME}; {weights}")
    wanted, has = {*facts["trainable"], *facts["frozen"]}, state.parameters.keys()
    for parameter in sorted(wanted ^ set(has)):
        where = f"is not in {state.name}{close_to(parameter, has)}" if parameter in wanted else f"is none of {name}"
        raise CheckpointError(f"the parameter {parameter} {where}", cure=cure)
    for value in proto.graph.input:
        if value.name in wanted and state.parameters[value.name].form != form_of(value):
            what = f"{value.name} is {state.parameters[value.name].form} in the state, {form_of(value)} in {name}"
            raise CheckpointError(what, cure=cure)
    for parameter in state.parameters.values():
        if parameter.requires_grad != (parameter.name in facts["trainable"]):
            raise CheckpointError(f"the state and {name} differ in whether {parameter.name} is trained", cure=cure)
    state.set_id = state.set_id or known


def match_evaluation(training: tuple[onnx.ModelProto, Any, str], evaluation: tuple[onnx.ModelProto, Any, str]) -> None:
    """Check that an evaluation model is of the set of a training model, or has the same inputs and weights.

    Args:
        training: model, facts and name, as ``read_model`` gives them.
        evaluation: the same.

    Raises:
        ArtifactError: else.
    """
    match_sets(training[1], training[2], evaluation[1], evaluation[2])
    mine, theirs = ({v.name: v.type for v in proto.graph.input} for proto, *_ in (training, evaluation))
    wanted = {*training[1]["trainable"], *training[1]["frozen"], *training[1]["inputs"]}
    for name in sorted(wanted ^ theirs.keys()):
        where, other = (training[2], evaluation[2]) if name in wanted else (evaluation[2], training[2])
        raise ArtifactError(f"{where} has the input {name}, {other} has not", cure=_SAME)
    for name in sorted(theirs.keys() & mine.keys()):
        if not _fits(mine[name], theirs[name]):
            raise ArtifactError(f"{name} has another form in {training[2]} than in {evaluation[2]}", cure=_SAME)


def _fits(one: onnx.TypeProto, other: onnx.TypeProto) -> bool:
    """Whether two inputs have the same type and no two sizes that differ."""
    first, second = one.tensor_type, other.tensor_type
    pairs = zip(first.shape.dim, second.shape.dim, strict=False)
    same = all(a.dim_value == b.dim_value for a, b in pairs if a.HasField("dim_value") and b.HasField("dim_value"))
    return same and first.elem_type == second.elem_type and len(first.shape.dim) == len(second.shape.dim)


def match_optimizer(state: CheckpointState, facts: Mapping[str, Any], proto: onnx.ModelProto, name: str) -> None:
    """Check that an optimizer model takes the gradients of the parameters that are trained, in their forms.

    Raises:
        ArtifactError: else.
    """
    trained = {n: p for n, p in state.parameters if p.requires_grad}
    if odd := sorted({*facts["parameters"]} ^ trained.keys()):
        raise ArtifactError(f"{name} and the module differ in whether {odd[0]} is trained", cure=_SAME)
    for value in proto.graph.input:
        for parameter in (p for n, p in trained.items() if value.name in (n, facts["parameters"][n])):
            if parameter.form != form_of(value):
                what = f"{value.name} is {form_of(value)} in {name}, {parameter.form} in the module"
                raise ArtifactError(what, cure=_SAME)


def match_sets(mine: Mapping[str, Any], name: str, theirs: Mapping[str, Any], other: str) -> None:
    """Check that two models are of one set, where both say of which.

    Raises:
        ArtifactError: else.
    """
    one, two = mine.get("set", ""), theirs.get("set", "")
    if one and two and one != two:
        raise ArtifactError(f"{name} is of the set {one[:12]}, {other} of the set {two[:12]}", cure=_SAME)
