"""Kernels for all ranks of a process group, each compiled once between them, whether or not they share a store."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from deepgemm_jit.cubin import Cubin
from deepgemm_jit.service import KernelService, Preparation
from deepgemm_jit.spec import KernelSpec

_T = TypeVar("_T")
Wanted = tuple[Sequence[KernelSpec], Sequence[int]]
"""Kernels, and the ordinals of the GPUs to load them into."""


def prepare_together(service: KernelService, wanted: Callable[[], Wanted], jobs: int | None, group: Any) -> Preparation:
    """Do what :meth:`KernelService.prepare` does, of a share of the compiles; all ranks of ``group`` must call it.

    Ranks may need different kernels, and have different ones in their stores: what some rank has is not compiled again.

    Args:
        service: that of this rank.
        wanted: says what this rank needs; what it raises is raised on every rank.
        jobs: compiles at a time on this rank.
        group: the process group.

    Returns:
        What became of this rank's kernels; ``compiled`` counts what it compiled for others too.

    Raises:
        Exception: as ``wanted`` and :meth:`KernelService.prepare`, on every rank, of itself or of the first rank that failed.
    """
    started, rank = time.monotonic(), dist.get_rank(group)

    def asked() -> tuple[list[str], set[str], list[int]]:
        specs, device_ordinals = wanted()
        return [spec.text for spec in specs], _lacked(service, specs), list(device_ordinals)

    everyones = _agreed(group, asked)
    texts, _, device_ordinals = everyones[rank]
    needed = _specs(texts)
    share = _nowhere([(texts, lacked) for texts, lacked, _ in everyones])[rank :: len(everyones)]
    built = _agreed(group, lambda: service.prepare(_specs(share), (), jobs=jobs))[rank]
    received = _exchanged(service, needed, group)

    def loaded() -> Preparation:
        for text, cubin in received.items():
            service.builder.keep(KernelSpec.from_text(text), cubin)
        return service.prepare(needed, device_ordinals, jobs=jobs)

    done = _agreed(group, loaded)[rank]
    return Preparation(done.kernels, built.compiled + done.compiled, time.monotonic() - started)


def _nowhere(told: Sequence[tuple[list[str], set[str]]]) -> list[str]:
    """Return what every rank that needs it lacks, of what ranks need and lack; in an order that all ranks agree on."""
    had = {text for needed, lacked in told for text in needed if text not in lacked}
    return sorted({text for _, lacked in told for text in lacked} - had)


def _exchanged(service: KernelService, needed: Sequence[KernelSpec], group: Any) -> dict[str, Cubin]:
    """Return the cubins that this rank still lacks, because its store is another one, from the ranks that have them."""
    rank, builder = dist.get_rank(group), service.builder
    lacked = _agreed(group, lambda: _lacked(service, needed))
    texts = sorted(set().union(*lacked))
    if not texts:
        return {}
    held: dict[str, Cubin] = {}

    def look_up() -> set[str]:
        found = {text: builder.try_cached(KernelSpec.from_text(text)) for text in texts}
        held.update({text: cubin for text, cubin in found.items() if cubin is not None})
        return set(held)

    holders = _agreed(group, look_up)
    first = {text: next((holder for holder, those in enumerate(holders) if text in those), None) for text in texts}
    sent = _agreed(group, lambda: {text: cubin for text, cubin in held.items() if first[text] == rank})
    return {text: cubin for part in sent for text, cubin in part.items() if text in lacked[rank]}


def _lacked(service: KernelService, specs: Sequence[KernelSpec]) -> set[str]:
    return {spec.text for spec in specs if service.builder.try_cached(spec) is None}


def _specs(texts: Sequence[str]) -> list[KernelSpec]:
    return [KernelSpec.from_text(text) for text in texts]


def _agreed(group: Any, work: Callable[[], _T]) -> list[_T]:
    """Do ``work`` on every rank and return what it gave on each; fail on all if it fails on one.

    Whatever a rank does between two collectives it does here: one that raised alone would leave the others waiting.
    """
    failure: Exception | None = None
    mine: tuple[_T | None, Exception | None]
    try:
        mine = work(), None
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait for it
        failure = error
        mine = None, _portable(error)
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, mine, group=group)
    theirs: Exception | None = None
    try:
        if failure is not None:
            raise failure
        for rank, (_, theirs) in enumerate(everyones):
            if theirs is not None:
                theirs.add_note(f"It was raised on rank {rank} of the process group.")
                raise theirs
        return [result for result, _ in everyones]
    finally:
        # An error holds this frame: held by the frame in turn, it would keep the group alive after its end.
        del failure, mine, everyones, theirs


def _portable(error: Exception) -> Exception:
    """Return an error that can be sent: itself, or its text where its class does not survive pickling."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    except Exception:  # noqa: BLE001 - whatever a class raises that cannot be made anew
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
