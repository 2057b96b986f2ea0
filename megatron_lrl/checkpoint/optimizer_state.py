"""State of Megatron-Core's Adam optimizers in one form that fits every layout.

Whatever the optimizer (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer), a checkpoint
holds for each model parameter its two moments and, for a parameter of half precision, the float32 master
weight: whole tensors of the parameter's shape, sharded over tp and pp like the parameter itself, under the
key `optimizer.<kind>.<the parameter's key>`. The distributed optimizer's flat shards are put together on
save and cut again on load, so dp and cp may change too, between sharded and unsharded optimizers as well.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_lrl import platform_cpu
from megatron_lrl.checkpoint.streaming import Live
from megatron_lrl.checkpoint.weights import require_finite, weights_state_dict
from megatron_lrl.models.meta import META
from megatron_lrl.precision import accumulate_dtype
from megatron_lrl.runtime import Runtime, unwrap

platform_cpu.install()

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params  # noqa: E402

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"


@dataclass(frozen=True)
class Shard:
    """This rank's part of a parameter's optimizer state: elements [start, end) of the flattened parameter.

    `main` is what the inner optimizer updates, flat or in the parameter's shape; `state` is its entry there
    and `group` its parameter group.
    """

    main: torch.Tensor
    state: dict[str, Any]
    group: dict[str, Any]
    start: int
    end: int

    def tensor(self, kind: str) -> torch.Tensor:
        """The live tensor of a kind, flat."""
        return (self.main.detach() if kind == MASTER else self.state[kind]).view(-1)


def prime(optimizer: Any) -> None:
    """Create the moments of an optimizer that has not stepped yet: zeros, as its first step would."""
    for part in _parts(optimizer):
        inner = part.optimizer
        for group in inner.param_groups:
            for main in group["params"]:
                state = inner.state[main]
                for kind in MOMENTS:
                    if kind not in state:
                        state[kind] = torch.zeros_like(main, requires_grad=False)
                if isinstance(inner, torch.optim.Adam) and "step" not in state:
                    # The fused step counts where the parameter lies.
                    device = main.device if group.get("fused") else "cpu"
                    state["step"] = torch.tensor(0.0, dtype=torch.float32, device=device)


def optimizer_step(optimizer: Any, runtime: Runtime) -> int:
    """Steps taken so far; collective, since a rank may own no shard."""
    steps = {
        int(shard.state.get("step", shard.group.get("step", 0))) for _, shard in _named_shards(optimizer)
    }
    found = set().union(*runtime.gather_objects(steps))
    if len(found) > 1:
        raise ValueError(f"parameters took different numbers of optimizer steps: {sorted(found)}")
    return found.pop() if found else 0


class Whole(Live):
    """Values of a state dict whose optimizer state may lie in pieces on the ranks that replicate its parameter.

    `state_dict` holds places without storage for those. A parameter's state of a kind is put together when its turn
    comes: parameter i on, and written by, replica i modulo their number. All replicas take the turns in one order, as
    many at a time as there are replicas, so that each holds one while all write.
    """

    def __init__(self, model: Any, optimizer: Any, runtime: Runtime) -> None:
        super().__init__()
        self._turns: list[tuple[int | None, Callable[[], torch.Tensor | None]]] = []
        self._at_once = runtime.groups.dp_cp.size()
        self._held: dict[int, torch.Tensor] = {}  # by the place's storage
        self.state_dict = self._of(model, optimizer, runtime)
        self._left = iter(self._turns)  # those that nobody has taken yet

    def _of(self, model: Any, optimizer: Any, runtime: Runtime) -> dict[str, Any]:
        """The sharded state dict of the optimizer."""
        shards = dict(_named_shards(optimizer))
        sharded = any(isinstance(part, DistributedOptimizer) for part in _parts(optimizer))
        trained = list(_trained(model))
        found: dict[str, Any] = {}
        for kind in (*MOMENTS, MASTER):
            for index, (name, parameter, entry) in enumerate(trained):
                # Norms exist on each tp rank, a tied head on two stages.
                if kind not in _kinds(parameter) or any(entry.replica_id[:-1]):
                    continue
                group, shard = _replicas(parameter, runtime), shards.get(parameter)
                owner = index % group.size()
                data = None
                if sharded:
                    if group.rank() == owner:
                        data = torch.empty(
                            parameter.shape, dtype=accumulate_dtype(parameter.dtype), device=META
                        )
                    gather = partial(_whole, shard, kind, parameter, owner, runtime)
                    self._turns.append((None if data is None else _storage(data), gather))
                elif group.rank() == owner and shard is not None:
                    data = shard.tensor(kind).view(parameter.shape)
                if data is not None:
                    found[f"{kind}.{name}"] = _renamed(
                        entry, kind, data, replica_id=(*entry.replica_id[:-1], 0)
                    )
        return found

    def in_turn(self, items: Sequence[Any], tensor_of: Callable[[Any], Any]) -> Generator[Any]:
        """What lies whole first. Collective over the replicas; `finish` takes the turns that are left."""
        places = {place for place, _ in self._turns}
        waiting: dict[int, list[Any]] = {}
        for item in items:
            tensor = tensor_of(item)
            place = _storage(tensor) if isinstance(tensor, torch.Tensor) else None
            if place in places and place is not None:
                waiting.setdefault(place, []).append(item)
            else:
                yield item
        while batch := list(islice(self._left, self._at_once)):
            for place, gather in batch:
                whole = gather()
                if place is not None and whole is not None:
                    self._held[place] = whole
            for place, _ in batch:
                if place is not None:
                    yield from waiting.get(place, ())
                    self._held.pop(place, None)

    def finish(self) -> None:
        self._held.clear()
        for _, gather in self._left:
            gather()

    def of(self, view: torch.Tensor) -> torch.Tensor:
        held = self._held.get(_storage(view))
        if held is None:
            return super().of(view)
        self.beside = sum(whole.nbytes for whole in self._held.values())
        return held.as_strided(view.shape, view.stride(), view.storage_offset())


def saving_bytes(model: Any, runtime: Runtime) -> int:
    """The most that a rank's checkpoint takes on the host beside the run: the largest parameter's state.

    Twice where optimizer shards are put together: one parameter waits to be written while the next comes.
    """
    largest = max(
        (
            p.numel() * accumulate_dtype(p.dtype).itemsize
            for p in unwrap(model).parameters()
            if p.requires_grad
        ),
        default=0,
    )
    return largest * (2 if runtime.groups.dp_cp.size() > 1 else 1)


@torch.no_grad()
def load_optimizer_state(model: Any, optimizer: Any, directory: Path, step: int) -> None:
    """Fill a primed or stepped optimizer from a checkpoint of any layout; collective.

    Kinds are read one after the other into host memory, each rank reading only parameters it owns a shard of.
    Raises what `dist_checkpointing.load` raises, and `UserError` naming a tensor that is not finite.
    """
    prime(optimizer)
    shards = dict(_named_shards(optimizer))
    trained = list(_trained(model))
    kinds = sorted({kind for _, parameter, _ in trained for kind in _kinds(parameter)})
    for kind in kinds:
        wanted = {name: (p, entry) for name, p, entry in trained if p in shards and kind in _kinds(p)}
        request = {name: _renamed(entry, kind, _initial(p, kind)) for name, (p, entry) in wanted.items()}
        loaded = dist_checkpointing.load(
            {"optimizer": request},
            str(directory),
            validate_access_integrity=False,  # shards are read by those that own a part of them
        ).get("optimizer", {})
        for name, (parameter, _) in wanted.items():
            shard = shards[parameter]
            mine = loaded[name].view(-1)[shard.start : shard.end]
            require_finite(mine, f"optimizer.{kind}.{name}", directory)
            shard.tensor(kind).copy_(mine)
    for shard in shards.values():
        if "step" in shard.state:
            shard.state["step"].fill_(float(step))
        else:
            shard.group["step"] = step


def _parts(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _named_shards(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, Shard]]:
    """(model parameter, this rank's shard) for every parameter that this rank updates a part of."""
    for part in _parts(optimizer):
        inner = part.optimizer
        groups = {id(main): group for group in inner.param_groups for main in group["params"]}
        for parameter, main, start, end in _pairs(part):
            yield parameter, Shard(main, inner.state[main], groups[id(main)], start, end)


def _pairs(part: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int, int]]:
    """(model parameter, what is updated in its place, first and last + 1 element)."""
    if isinstance(part, DistributedOptimizer):
        # Its own index of parameters is wrong where float32 ones stand among halves: it counts them in another order.
        kinds = (
            (part.model_float16_groups, part.shard_fp32_from_float16_groups),
            (part.model_fp32_groups, part.shard_fp32_groups),
        )
        for parameter, main in (
            pair
            for models, mains in kinds
            for group in zip(models, mains, strict=True)
            for pair in zip(*group, strict=True)
        ):
            owned = part._get_model_param_range_map(parameter)["param"]
            yield parameter, main, owned.start, owned.end
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        for halves, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            for parameter, main in zip(halves, mains, strict=True):
                yield parameter, main, 0, parameter.numel()
        for parameters in part.fp32_from_fp32_groups:
            for parameter in parameters:
                yield parameter, parameter, 0, parameter.numel()
    else:
        for parameter in part.get_parameters():
            yield parameter, parameter, 0, parameter.numel()


def _trained(model: Any) -> Iterator[tuple[str, torch.nn.Parameter, Any]]:
    """(name, parameter, its sharded tensor or factory), equal in order on all replicas."""
    entries = weights_state_dict(model)
    for name, parameter in unwrap(model).named_parameters():
        if parameter.requires_grad:
            yield name, parameter, entries[name]


def _kinds(parameter: torch.Tensor) -> tuple[str, ...]:
    """A float32 or float64 parameter is its own master weight."""
    return (*MOMENTS, MASTER) if parameter.dtype.itemsize == 2 else MOMENTS


def _replicas(parameter: torch.Tensor, runtime: Runtime) -> Any:
    """The ranks that hold the same parameter: dp and cp, or those with the same experts (Megatron-Core's mark)."""
    return runtime.groups.dp_cp if getattr(parameter, "allreduce", True) else runtime.groups.expt_dp


def _initial(parameter: torch.Tensor, kind: str) -> torch.Tensor:
    """What a load starts from; rows that pad the vocabulary in one layout only keep it."""
    shape, dtype = parameter.shape, accumulate_dtype(parameter.dtype)
    return parameter.detach().to("cpu", dtype) if kind == MASTER else torch.zeros(shape, dtype=dtype)


def _renamed(entry: Any, kind: str, data: torch.Tensor, **changes: Any) -> Any:
    """The parameter's sharded tensor, or factory of several, for its optimizer state of a kind."""
    if hasattr(entry, "dtype"):  # a factory builds its tensors from the data, dtype included
        changes["dtype"] = data.dtype
    return replace(entry, key=f"optimizer.{kind}.{entry.key}", data=data, **changes)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _whole(
    shard: Shard | None, kind: str, parameter: torch.Tensor, owner: int, runtime: Runtime
) -> torch.Tensor | None:
    """The state of a whole parameter in host memory on replica `owner`, else None; collective over its replicas.

    Shards are added up as integers: each element comes from one rank and zeros from the others, and every bit
    of it survives, the sign of a zero included.
    """
    group = _replicas(parameter, runtime)
    whole = torch.zeros(parameter.numel(), dtype=accumulate_dtype(parameter.dtype), device=runtime.device)
    if shard is not None:
        whole[shard.start : shard.end] = shard.tensor(kind)
    if group.size() > 1:
        bits = whole.view(torch.int64 if whole.dtype == torch.float64 else torch.int32)
        dist.reduce(bits, dst=dist.get_global_rank(group, owner), group=group)
    return whole.view(parameter.shape).cpu() if group.rank() == owner else None
