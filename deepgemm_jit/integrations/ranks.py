"""Kernels for all ranks of a process group, each compiled once between them, whether or not they share a store."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from deepgemm_jit.errors import DeepGemmJitError
from deepgemm_jit.service import KernelService, Preparation
from deepgemm_jit.spec import KernelSpec


def prepare_together(
    service: KernelService, specs: Sequence[KernelSpec], device_ordinals: Sequence[int], jobs: int | None, group: Any
) -> Preparation:
    """Do what :meth:`KernelService.prepare` does, of a share of the compiles; all ranks of ``group`` must call it.

    Ranks may need different kernels, and have different ones in their stores: what some rank has is not compiled again.

    Returns:
        What became of this rank's kernels; ``compiled`` counts what it compiled for others too.

    Raises:
        DeepGemmJitError: as :meth:`KernelService.prepare`, on every rank, of the first rank that failed.
    """
    started = time.monotonic()
    share = _share(service, specs, group)
    built = _agreed(group, lambda: service.prepare(share, (), jobs=jobs))
    _exchange(service, specs, group)
    loaded = _agreed(group, lambda: service.prepare(specs, device_ordinals, jobs=jobs))
    return Preparation(loaded.kernels, built.compiled + loaded.compiled, time.monotonic() - started)


def _share(service: KernelService, specs: Sequence[KernelSpec], group: Any) -> list[KernelSpec]:
    """Return the kernels that this rank is to compile: its part of those that every rank that needs them lacks."""
    lacked = _lacked(service, specs)
    told = _gathered(group, ([spec.text for spec in specs], [spec.text for spec in lacked]))
    had = {text for needed, missing in told for text in needed if text not in missing}
    nowhere = sorted({text for _, missing in told for text in missing} - had)
    return [KernelSpec.from_text(text) for text in nowhere[dist.get_rank(group) :: dist.get_world_size(group)]]


def _exchange(service: KernelService, specs: Sequence[KernelSpec], group: Any) -> None:
    """Hand on cubins to the ranks that still lack them, because their store is another one."""
    lacked = {spec.text for spec in _lacked(service, specs)}
    wanted = sorted(set().union(*_gathered(group, lacked)))
    if not wanted:
        return
    builder = service.builder
    held = {text: builder.try_cached(KernelSpec.from_text(text)) for text in wanted}
    holders = _gathered(group, {text for text, cubin in held.items() if cubin is not None})
    rank = dist.get_rank(group)
    first = {text: next((holder for holder, texts in enumerate(holders) if text in texts), None) for text in wanted}
    for sent in _gathered(group, {text: held[text] for text in wanted if first[text] == rank}):
        for text, cubin in sent.items():
            if text in lacked:
                builder.keep(KernelSpec.from_text(text), cubin)


def _lacked(service: KernelService, specs: Sequence[KernelSpec]) -> list[KernelSpec]:
    return [spec for spec in specs if service.builder.try_cached(spec) is None]


def _agreed(group: Any, work: Callable[[], Preparation]) -> Preparation:
    """Do ``work`` on every rank, and fail on all if it fails on one: a rank that raised alone would leave the others waiting."""
    done: Preparation | DeepGemmJitError
    try:
        done = work()
    except DeepGemmJitError as error:
        done = error
    outcomes = _gathered(group, done)
    if isinstance(done, DeepGemmJitError):
        raise done
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, DeepGemmJitError):
            outcome.add_note(f"It was raised on rank {rank} of the process group.")
            raise outcome
    return done


def _gathered(group: Any, mine: Any) -> list[Any]:
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, mine, group=group)
    return everyones
