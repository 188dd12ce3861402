"""The names of PyTorch that stand for recorders while a user's code is read, and their recorders.

A recorder takes the place of what it records wherever a module holds that under any name: in its
public homes, and in modules of the user's that were imported before. One that is called while
nothing is read calls what it stands for.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

from shardwright.compiler.frontend.pytorch import recording as said
from shardwright.compiler.frontend.pytorch.distribution import Recompute
from shardwright.compiler.frontend.pytorch.recorded_mesh import RecordedGroup, RecordedMesh
from shardwright.compiler.frontend.pytorch.recording import Recording

Getter = Callable[[], Recording | None]
Recorder = Callable[..., Any]
"""Takes the recording, what it stands for, and the arguments of the call."""
_DIST = "torch.distributed"


@contextmanager
def patched(active: Getter, loads: bool) -> Iterator[None]:
    """Recorders in place of what they stand for, in homes that are loaded already or, where it
    `loads` them, in all. Raises ModuleNotFoundError without torch."""
    torch: Any = import_module("torch")
    undo: list[tuple[Any, str, Any]] = []

    def put(holder: Any, name: str, value: Any) -> None:
        undo.append((holder, name, vars(holder)[name]))
        setattr(holder, name, value)

    everywhere = _by_identity(active, _rows(), loads)
    outside = _by_identity(active, _answers(), loads)
    try:
        for module, name, recorder in [*_held(everywhere, True), *_held(outside, False)]:
            put(module, name, recorder)
        for name, recorder in _METHODS_OF_MODULES.items():
            put(torch.nn.Module, name, _wrapped(active, recorder, vars(torch.nn.Module)[name]))
        yield
    finally:
        for holder, name, original in reversed(undo):
            setattr(holder, name, original)


Replaced = dict[int, tuple[Any, Any]]
"""What is replaced and by what, by the identity of the first."""


def _by_identity(
    active: Getter, rows: Iterator[tuple[str, str, Recorder]], loads: bool
) -> Replaced:
    """The recorders of those that this torch has, the first row of each."""
    found: Replaced = {}
    for home, name, recorder in rows:
        if not loads and home not in sys.modules:
            continue
        try:
            original = getattr(import_module(home), name, None)
        except ImportError:  # a home of another release
            continue
        if original is not None and id(original) not in found:
            found[id(original)] = original, _wrapped(active, recorder, original)
    return found


def _held(replaced: Replaced, in_torch: bool) -> Iterator[tuple[Any, str, Any]]:
    """Every module that holds one of the originals, under whichever name; of torch's own, unless
    `in_torch`, the public home alone."""
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.startswith("shardwright."):
            continue
        if not in_torch and module.__name__.startswith("torch.") and module.__name__ != _DIST:
            continue
        for name, value in list(vars(module).items()):
            found = replaced.get(id(value))
            if found is not None and found[0] is value:
                yield module, name, found[1]


def _wrapped(active: Getter, recorder: Recorder, original: Any) -> Any:
    """What stands for `original`: a class for a class, so that it can be asked about and
    inherited from."""
    if not isinstance(original, type):

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            recording = active()
            if recording is None:
                return original(*args, **kwargs)
            return recorder(recording, original, *args, **kwargs)

        return function

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        recording = active()
        if recording is None or not getattr(cls, "_records", False):
            return original(*args, **kwargs)
        return recorder(recording, original, *args, **kwargs)

    body = {"__new__": new, "__module__": original.__module__, "_records": True}
    return type(original)(original.__name__, (original,), body)


def _rows() -> Iterator[tuple[str, str, Recorder]]:
    """(home, name, recorder) of all that shards, cuts or recomputes a module."""
    fsdp, composable = "torch.distributed.fsdp", "torch.distributed._composable"
    wrapper = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
    pipelines = "torch.distributed.pipelining"
    mesh = "torch.distributed.device_mesh"
    yield "torch.distributed.fsdp", "fully_shard", _fully_shard
    yield f"{composable}.fsdp", "fully_shard", _fully_shard  # its home up to torch 2.5
    yield fsdp, "FullyShardedDataParallel", _fsdp1
    yield "torch.nn.parallel", "DistributedDataParallel", _ddp
    yield f"{composable}.replicate", "replicate", _ddp
    yield f"{composable}.replicate_with_fsdp", "replicate", _ddp  # torch 2.9
    yield f"{composable}.checkpoint_activation", "checkpoint", _composable_checkpoint
    yield "torch.distributed.tensor.parallel", "parallelize_module", _parallelize
    yield mesh, "init_device_mesh", _init_device_mesh
    yield mesh, "DeviceMesh", _device_mesh
    yield wrapper, "checkpoint_wrapper", _checkpoint_wrapper
    yield wrapper, "offload_wrapper", _offload_wrapper
    yield wrapper, "apply_activation_checkpointing", _apply_checkpointing
    yield "torch.utils.checkpoint", "checkpoint", _checkpoint
    yield "torch", "compile", _compile
    yield pipelines, "pipeline", _pipeline
    yield pipelines, "PipelineStage", _stage
    for name in _SCHEDULES:
        yield pipelines, name, functools.partial(_schedule, name)
    yield f"{pipelines}.schedules", "get_schedule_class", _schedule_class
    yield "torch.distributed.tensor", "distribute_tensor", _distribute_tensor
    yield "torch.distributed.tensor", "distribute_module", _distribute_module
    yield "torch.cuda", "set_device", _nothing
    for name in _COLLECTIVES:
        yield _DIST, name, _nothing


_SCHEDULES = (
    *("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleLoopedBFS"),
    *("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"),
)
_COLLECTIVES = (
    *("init_process_group", "destroy_process_group", "barrier", "broadcast", "all_reduce"),
    *("broadcast_object_list", "monitored_barrier"),
)
"""Of one process there is nothing to do: a sum over ranks is not known, and not needed to build a
model."""


def _answers() -> Iterator[tuple[str, str, Recorder]]:
    """Names of torch.distributed that say who this process is; torch itself goes on asking those
    where they live."""

    def size(recording: Recording, original: Any, group: Any = None) -> int:
        return group.ranks if isinstance(group, RecordedGroup) else recording.ranks

    def new_group(recording: Recording, original: Any, ranks: Any = None, **_: Any) -> Any:
        return RecordedGroup((), len(ranks) if ranks else recording.ranks)

    yield _DIST, "get_world_size", size
    yield _DIST, "new_group", new_group
    for name in ("get_rank", "get_node_local_rank", "get_group_rank"):
        yield _DIST, name, lambda *_, **__: 0
    for name in ("is_initialized", "is_available", "is_torchelastic_launched"):
        yield _DIST, name, lambda *_, **__: True
    yield _DIST, "get_backend", lambda *_, **__: "gloo"


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _many(modules: Any) -> Sequence[Any]:
    return list(modules) if isinstance(modules, list | tuple) else [modules]


def _fully_shard(
    recording: Recording,
    original: Any,
    module: Any,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    **others: Any,
) -> Any:
    is_offloaded = type(offload_policy).__name__ == "CPUOffloadPolicy"
    said.record_unit(
        recording,
        _many(module),
        mesh=mesh,
        reshard=reshard_after_forward,
        policy=mp_policy,
        offload="cpu" if is_offloaded else "",
    )
    for name, value in others.items():
        if value:
            recording.other(f"fully_shard({name}=...)")
    for one in _many(module):
        _lend_methods(recording, one)
    return module


_METHODS = {
    "set_modules_to_forward_prefetch": "forward_prefetch",
    "set_modules_to_backward_prefetch": "backward_prefetch",
    "set_requires_gradient_sync": "requires_gradient_sync",
    "set_requires_all_reduce": "requires_all_reduce",
    "set_reshard_after_backward": "reshard_after_backward",
    "set_reshard_after_forward": "set_reshard_after_forward",
    "set_gradient_divide_factor": "gradient_divide_factor",
    "set_is_last_backward": "is_last_backward",
    "unshard": "unshard",
    "reshard": "reshard",
}
"""Methods of FSDPModule -> the term that they say."""


def _lend_methods(recording: Recording, module: Any) -> None:
    """The methods that `fully_shard` adds to a module."""
    for name, term in _METHODS.items():

        def method(*args: Any, _term: str = term, **_: Any) -> None:
            shown = args[0] if args else ""
            shown = len(shown) if isinstance(shown, list | tuple) else shown
            recording.other(_term, shown)

        if not hasattr(module, name):
            recording.lend(module, name, method)


def _fsdp1(recording: Recording, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """FullyShardedDataParallel: its units are those of the policy, then the module itself."""
    names = ("process_group", "sharding_strategy", "cpu_offload", "auto_wrap_policy")
    given = dict(zip(names, args, strict=False)) | kwargs
    kind = getattr(given.get("sharding_strategy"), "name", "FULL_SHARD")
    policy, mesh = given.get("mixed_precision"), given.get("device_mesh")
    is_offloaded = bool(getattr(given.get("cpu_offload"), "offload_params", False))
    if kind == "NO_SHARD":
        said.record_replicas(recording, module, mesh, policy=policy)
        return _with_module(recording, module)
    if kind.startswith(("HYBRID", "_HYBRID")) and mesh is None:
        recording.other("ShardingStrategy", f"{kind} without a device_mesh")
    for one in (*_wrapped_by(given.get("auto_wrap_policy"), module), module):
        said.record_unit(
            recording,
            [one],
            mesh=mesh,
            reshard="ZERO2" not in kind and kind != "SHARD_GRAD_OP",
            policy=policy,
            offload="cpu" if is_offloaded else "",
        )
    if given.get("forward_prefetch"):
        recording.other("forward_prefetch", True)
    if given.get("ignored_modules") or given.get("ignored_states"):
        recording.other("ignored_modules")
    return _with_module(recording, module)


def _wrapped_by(policy: Any, root: Any) -> Iterator[Any]:
    """The modules that an auto_wrap_policy makes units, the inner ones first."""
    if policy is None:
        return
    chosen = getattr(policy, "_lambda_fn", None)  # of CustomPolicy, which has no other way to ask
    if chosen is not None:
        inner = [m for m in root.modules() if m is not root and chosen(m)]
        yield from reversed(inner)
        return

    def visit(module: Any) -> tuple[list[Any], int]:
        """Units inside, and how many elements they hold."""
        whole = sum(p.numel() for p in module.parameters())
        if not policy(module=module, recurse=True, nonwrapped_numel=whole):
            return [], 0
        found: list[Any] = []
        held = 0
        for child in module.children():
            units, taken = visit(child)
            found, held = found + units, held + taken
        rest = whole - held
        if module is not root and policy(module=module, recurse=False, nonwrapped_numel=rest):
            return [*found, module], whole
        return found, held

    yield from visit(root)[0]


def _ddp(recording: Recording, original: Any, module: Any, *_: Any, **kwargs: Any) -> Any:
    bucket, mesh = kwargs.get("bucket_cap_mb"), kwargs.get("device_mesh")
    said.record_replicas(recording, module, mesh, bucket)
    return _with_module(recording, module)


def _with_module(recording: Recording, module: Any) -> Any:
    """The module, whose `.module` is what a wrapper's would be."""
    if "module" not in module.__dict__ and not hasattr(module, "module"):
        recording.lend(module, "module", module)
    return module


def _parallelize(
    recording: Recording,
    original: Any,
    module: Any,
    device_mesh: Any = None,
    parallelize_plan: Any = None,
    **_: Any,
) -> Any:
    said.record_plan(recording, module, device_mesh, parallelize_plan)
    return module


def _init_device_mesh(
    recording: Recording,
    original: Any,
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    **_: Any,
) -> RecordedMesh:
    loc = recording.here()
    return RecordedMesh.of(device_type, mesh_shape, mesh_dim_names, loc, recording.meshes)


def _device_mesh(
    recording: Recording,
    original: Any,
    device_type: str,
    mesh: Any = None,
    *,
    mesh_dim_names: Sequence[str] | None = None,
    **_: Any,
) -> RecordedMesh:
    import torch

    shape = torch.as_tensor(mesh).shape
    return _init_device_mesh(recording, original, device_type, shape, mesh_dim_names=mesh_dim_names)


def _checkpoint_wrapper(
    recording: Recording, original: Any, module: Any, *_: Any, **kwargs: Any
) -> Any:
    keeps = Recompute.SELECTIVE if kwargs.get("context_fn") else Recompute.FULL
    said.record_checkpoint(recording, module, keeps)
    return module


def _composable_checkpoint(recording: Recording, original: Any, module: Any, **kwargs: Any) -> Any:
    return _checkpoint_wrapper(recording, original, module, **kwargs)


def _offload_wrapper(recording: Recording, original: Any, module: Any) -> Any:
    said.record_checkpoint(recording, module, Recompute.OFFLOAD)
    return module


def _apply_checkpointing(
    recording: Recording,
    original: Any,
    model: Any,
    checkpoint_wrapper_fn: Any = None,
    check_fn: Any = None,
    auto_wrap_policy: Any = None,
) -> None:
    """Every module below the model that is chosen goes through the wrapper of the user's."""
    wrap = checkpoint_wrapper_fn or functools.partial(_checkpoint_wrapper, recording, original)
    if auto_wrap_policy is not None:
        chosen = list(_wrapped_by(auto_wrap_policy, model))
    else:
        chosen = [m for m in model.modules() if m is not model and (not check_fn or check_fn(m))]
    for module in chosen:
        wrap(module)


def _checkpoint(
    recording: Recording, original: Any, function: Any, *args: Any, **kwargs: Any
) -> Any:
    """A call in a forward pass that is run while the code is read."""
    import torch

    own = {name: value for name, value in kwargs.items() if name not in _OF_CHECKPOINT}
    if isinstance(function, torch.nn.Module):
        keeps = Recompute.SELECTIVE if "context_fn" in kwargs else Recompute.FULL
        said.record_checkpoint(recording, function, keeps)
    else:
        recording.other("torch.utils.checkpoint", getattr(function, "__qualname__", "a function"))
    return function(*args, **own)


_OF_CHECKPOINT = (
    *("use_reentrant", "context_fn", "determinism_check", "debug", "preserve_rng_state"),
    "early_stop",
)
"""Arguments of torch.utils.checkpoint.checkpoint that are not the function's."""


def _compile(recording: Recording, original: Any, model: Any = None, **kwargs: Any) -> Any:
    if model is None:
        return lambda inner: inner
    recording.other("torch.compile")
    return model


def _made(recording: Recording, original: Any, module: Any, *_: Any, **__: Any) -> None:
    recording.other("torch.compile")


def _to(recording: Recording, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """The conversions of `.to()`; devices stay, but for `meta` and `cpu`, which every torch has."""
    if "device" in kwargs and not _is_here(kwargs["device"]):
        del kwargs["device"]
    rest = [one for one in args if _is_here(one)]
    return original(module, *rest, **kwargs) if (rest or kwargs) and rest != [None] else module


def _to_empty(recording: Recording, original: Any, module: Any, **kwargs: Any) -> Any:
    device = kwargs.get("device")
    return original(module, **kwargs) if _is_here(device) else module


_METHODS_OF_MODULES: Mapping[str, Recorder] = {
    "to": _to,
    "to_empty": _to_empty,
    "cuda": _to,
    "compile": _made,
}
"""Methods of nn.Module that name a device, or compile."""


def _is_here(device: Any) -> bool:
    """False for what names a device of another kind."""
    import torch

    if isinstance(device, bool) or device is None:
        return True
    if isinstance(device, int):
        return False
    if isinstance(device, str):
        return device.partition(":")[0] in ("cpu", "meta")
    return not isinstance(device, torch.device) or device.type in ("cpu", "meta")


class _Pipe:
    """What `pipeline` gives: the model, whole."""

    def __init__(self, model: Any, stages: int) -> None:
        self.model, self.num_stages = model, stages

    def build_stage(self, index: int, device: Any = None, group: Any = None) -> _Stage:
        """A stage of it."""
        return _Stage(index, self.num_stages, group)

    def get_stage_module(self, index: int) -> Any:
        """The model: stages are parts of what is compiled, not modules."""
        return self.model


class _Stage:
    """A stage, by its number."""

    def __init__(self, index: int, stages: int, group: Any) -> None:
        self.stage_index, self.num_stages, self.group = index, stages, group
        self.is_first, self.is_last = index == 0, index == stages - 1


class _Schedule:
    """A schedule that nothing runs under."""


def _pipeline(
    recording: Recording,
    original: Any,
    module: Any,
    mb_args: Any = (),
    mb_kwargs: Any = None,
    split_spec: Any = None,
    split_policy: Any = None,
) -> _Pipe:
    if split_policy is not None:
        recording.other("split_policy", getattr(split_policy, "__name__", "a function"))
    said.record_split(recording, module, split_spec or {})
    return _Pipe(module, len(split_spec or {}) + 1)


def _stage(
    recording: Recording,
    original: Any,
    submodule: Any,
    stage_index: int,
    num_stages: int,
    *_: Any,
    group: Any = None,
    **__: Any,
) -> _Stage:
    if num_stages > 1:
        got = f"a PipelineStage of a part of it ({stage_index} of {num_stages})"
        raise said.split_refused("the whole model and names of modules", got, recording.here())
    return _Stage(stage_index, num_stages, group)


def _schedule(
    name: str, recording: Recording, original: Any, stage: Any, *args: Any, **kwargs: Any
) -> _Schedule:
    number = args[0] if args else kwargs.get("n_microbatches")
    one = stage[0] if isinstance(stage, list | tuple) else stage
    said.record_schedule(recording, name, number, getattr(one, "group", None))
    return _Schedule()


def _schedule_class(recording: Recording, original: Any, name: str) -> Any:
    wanted = next((one for one in _SCHEDULES if one.lower() == f"schedule{name}".lower()), name)
    return functools.partial(_schedule, wanted, recording, original)


def _distribute_tensor(recording: Recording, original: Any, tensor: Any, *_: Any, **__: Any) -> Any:
    recording.other("distribute_tensor", tuple(tensor.shape))
    return tensor


def _distribute_module(recording: Recording, original: Any, module: Any, *_: Any, **__: Any) -> Any:
    recording.other("distribute_module", type(module).__name__)
    return module
