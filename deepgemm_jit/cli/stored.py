"""``verify``, ``list`` and ``show``: what the store holds, whether it is sound, and what it lacks."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from deepgemm_jit.cli.audited import compare_audit
from deepgemm_jit.cli.output import Reply, Session, Table, command, count, entry_payload, open_store
from deepgemm_jit.cli.packs import checked_pack
from deepgemm_jit.cli.planning import PlanOptions, arch_option, model_options
from deepgemm_jit.cli.terminal import say
from deepgemm_jit.errors import StoreError
from deepgemm_jit.spec import ARCHES, KernelSpec, kernels_by_name
from deepgemm_jit.spec.kernel_set import dynamic_shared_memory_bytes
from deepgemm_jit.store import Entry


@click.command()
@arch_option(required=False)
@model_options(required=False)
@click.option(
    "--audit",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="What DEEPGEMM_JIT_AUDIT wrote: report the kernels in it that the plan does not name or the store still lacks.",
)
@command
def verify(session: Session, arch: str | None, audit: Path | None, **options: Any) -> Reply:
    """Check every entry of the store; with --arch and --audit, that no kernel is missing."""
    if arch is None and any(value is not None for value in options.values()):
        raise click.UsageError("--model and its sizes need --arch.")
    try:
        opened = open_store(session.settings())
    except StoreError as error:
        # The object stays the one of this command: programs that read it look for what is bad.
        bad = [{"path": error.path, "reason": str(error)}]
        say(f"Error: {error}", err=True)
        return Reply({"ok": False, "checked": 0, "bad": bad, "missing": []}, (), ok=False)
    examined = opened.examined()
    packs = [checked_pack(found) for found in opened.packs()]
    # A kernel of a pack is as good as one of the store.
    sound = {(entry.key, entry.spec) for entry in (*examined.sound, *(entry for pack in packs for entry in pack.entries))}

    def is_built(spec: KernelSpec) -> bool:
        # By key, not by a look-up: that sets damaged files aside, and a check leaves the store as it is.
        return (opened.builder.request(spec).key, spec.text) in sound

    checked = examined.checked
    bad = [*examined.bad, *({"path": str(pack.path), "reason": pack.reason} for pack in packs if pack.reason)]

    parts: list[str | Table] = [f"store: {opened.place.text}", f"{count(checked, 'entry', 'entries')} checked, {len(bad)} bad"]
    parts += [f"pack: {pack.path} (from {pack.origin}), {count(len(pack.entries), 'kernel')}" for pack in packs]
    if bad:
        parts.append(Table(("bad", "reason"), [(fault["path"], fault["reason"]) for fault in bad]))
    missing = []
    planned = None
    if arch is not None:
        wanted = PlanOptions(arch, **options)
        plan = wanted.plan()
        planned, fix = plan.kernels, wanted.warmup_command(session, plan)
        missing = [{"name": spec.name, "command": fix} for spec in planned if not is_built(spec)]
        parts.append(f"{len(missing)} of {count(len(planned), 'kernel')} missing")
        if missing:
            parts += [Table(("missing",), [(kernel["name"],) for kernel in missing]), f"build them with: {fix}"]
    elif audit is None:
        parts.append("whether kernels are missing was not checked; name an arch with --arch")
    if audit is not None:
        found = compare_audit(session, audit, planned, is_built)
        parts += found.parts
        bad += found.bad
        named = {kernel["name"] for kernel in missing}
        missing += [kernel for kernel in found.missing if kernel["name"] not in named]
    ok = not bad and not missing
    return Reply({"ok": ok, "checked": checked, "bad": bad, "missing": missing}, parts, ok)


@click.command(name="list")
@command
def list_(session: Session) -> Reply:
    """List what the store holds, what is damaged, and the packs beside it."""
    opened = open_store(session.settings())
    examined = opened.examined()
    entries = sorted(examined.sound, key=lambda entry: (entry.entry, entry.nvrtc_version, entry.key))
    packs = [checked_pack(found) for found in opened.packs()]
    total_bytes = sum({entry.digest: entry.size_bytes for entry in entries}.values())
    rows = [
        (
            e.entry,
            e.nvrtc_version,
            e.facts.registers,
            e.facts.spill_store_bytes + e.facts.spill_load_bytes,
            e.size_bytes,
            e.key[:12],
        )
        for e in entries
    ]
    return Reply(
        {
            "store": str(opened.place.root),
            "entries": [entry_payload(entry) for entry in entries],
            "size_bytes": total_bytes,
            "bad": examined.bad,
            "packs": [
                {"path": str(pack.path), "origin": pack.origin, "kernels": len(pack.entries), "reason": pack.reason}
                for pack in packs
            ],
        },
        [
            Table(("kernel", "NVRTC", "registers", "spill bytes", "size bytes", "request key"), rows),
            Table(("damaged, built again on next use", "reason"), [(found.path, found.reason) for found in examined.damage]),
            Table(
                ("pack", "from", "kernels", "why it is ignored"),
                [(pack.path, pack.origin, len(pack.entries), pack.reason) for pack in packs],
            ),
            f"store: {opened.place.text}",
            f"{count(len(entries), 'entry', 'entries')}, {total_bytes / 2**20:.1f} MiB of cubins",
        ],
    )


@click.command()
@click.argument("name")
@command
def show(session: Session, name: str) -> Reply:
    """Show one kernel: what it is, what the compiler made of it, and its rendered source."""
    opened = open_store(session.settings())
    builder = opened.builder
    stored = [entry for entry in opened.entries() if entry.entry == name]
    damage = {found.index_name: found.reason for found in opened.examined().damage}
    known = {name: spec for arch in ARCHES for name, spec in kernels_by_name(arch).items()}
    spec = known.get(name)
    if spec is None:
        return _earlier(name, known, stored, damage)
    request = builder.request(spec)
    dynamic_bytes = dynamic_shared_memory_bytes(spec)
    states = ["damaged" if index_name(e) in damage else "current" if e.key == request.key else "of other sources" for e in stored]
    options = " ".join(request.options)
    packed = [(f.path, e) for f in opened.packs() if f.pack for e in f.pack.entries if e.key == request.key]
    packs = sorted({path for path, _ in packed})
    unbuilt = "not in the store" if packed else f"not built; {builder.warmup_command(spec.arch)} builds it"
    facts = _facts(stored, states, str(dynamic_bytes)) if stored else unbuilt
    # A damaged index entry says of no kernel that it is its own; its file name does.
    own = {index_name(entry) for entry in stored} | {file for file in damage if file.startswith(request.key)}
    bad = [{"entry": file, "reason": damage[file]} for file in sorted(own & damage.keys())]
    return Reply(
        {
            "name": spec.name,
            "family": spec.family,
            "spec": spec.text,
            "key": request.key,
            "options": list(request.options),
            "dynamic_shared_memory_bytes": dynamic_bytes,
            "entries": [
                {**entry_payload(entry), "current": entry.key == request.key, "sound": index_name(entry) not in damage}
                for entry in stored
            ],
            "bad": bad,
            "packs": [str(path) for path in packs],
            "source": request.source,
        },
        [
            spec.name,
            f"spec: {spec.text}",
            f"options: {options}",
            f"request key: {request.key}",
            facts,
            *(f"damaged: {fault['entry']}: {fault['reason']}" for fault in bad),
            *(f"in pack {path}, built by NVRTC {e.nvrtc_version}" for path, e in packed),
            "",
            request.source,
        ],
    )


def _earlier(name: str, known: Iterable[str], stored: list[Entry], damage: dict[str, str]) -> Reply:
    """Answer for a kernel that the store holds and this version does not know: it has neither key nor source here."""
    if not stored:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "deepgemm-jit kernels lists them."
        raise click.BadParameter(f"no kernel is called {name!r}; {hint}", param_hint="NAME")
    bad = [{"entry": index_name(e), "reason": damage[index_name(e)]} for e in stored if index_name(e) in damage]
    states = ["damaged" if index_name(e) in damage else "of another version" for e in stored]
    return Reply(
        {
            "name": name,
            "family": None,
            "spec": stored[0].spec,
            "key": None,
            "options": list(stored[0].options),
            "dynamic_shared_memory_bytes": None,
            "entries": [{**entry_payload(entry), "current": False, "sound": index_name(entry) not in damage} for entry in stored],
            "bad": bad,
            "packs": [],
            "source": None,
        },
        [
            name,
            f"spec: {stored[0].spec}",
            "in no kernel set of this version, which never uses it; deepgemm-jit prune --unused-for removes what is not used",
            _facts(stored, states, "?"),
            *(f"damaged: {fault['entry']}: {fault['reason']}" for fault in bad),
        ],
    )


def _facts(stored: list[Entry], states: list[str], dynamic_bytes: str) -> Table:
    headings = (
        "NVRTC",
        "registers",
        "shared memory, static + dynamic",
        "local memory",
        "spills, stores + loads",
        "size",
        "entry",
    )
    rows = [
        (
            e.nvrtc_version,
            e.facts.registers,
            f"{e.facts.shared_memory_bytes} + {dynamic_bytes}",
            e.facts.local_memory_bytes,
            f"{e.facts.spill_store_bytes} + {e.facts.spill_load_bytes}",
            e.size_bytes,
            state,
        )
        for e, state in zip(stored, states, strict=True)
    ]
    return Table(headings, rows)


def index_name(entry: Entry) -> str:
    """Return the file name of an entry."""
    return f"{entry.key}.{entry.nvrtc_version}.json"
