"""The packs that serve this process: those that the settings name, then those that installed packages carry."""

from __future__ import annotations

import errno
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from deepgemm_jit.cubin import Cubin
from deepgemm_jit.settings import PREFIX, Settings
from deepgemm_jit.spec import KernelSpec
from deepgemm_jit.spec.shown import shown
from deepgemm_jit.store.entry import Entry
from deepgemm_jit.store.location import error_text
from deepgemm_jit.store.pack import Pack, read_pack
from deepgemm_jit.store.trust import DamagedError

ENTRY_POINTS = "deepgemm_jit.packs"
"""Group in which a package says ``"file.pack" = "package"``: the file lies in the package, of which nothing is imported."""

_MAY_PASS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Of this process or its machine, whatever file it was that met it."""
_MOST_TEXT = 300


@dataclass(frozen=True, slots=True)
class FoundPack:
    """A pack that was named: open, or why not."""

    path: Path
    origin: str
    pack: Pack | None
    reason: str = ""


class Packs:
    """All packs of a process; opened on first use, and looked at only after the store itself.

    Args:
        settings: name packs.
        warn: is told of each pack that cannot be used, once, with what it is about and a text.
    """

    def __init__(self, settings: Settings, warn: Callable[[str, str], None]) -> None:
        self._settings = settings
        self._warn = warn
        self._found: dict[str, tuple[FoundPack, ...]] = {}
        self._index: dict[str, Mapping[str, Mapping[str, tuple[Pack, Entry]]]] = {}
        self._dropped: set[Path] = set()

    def found(self) -> tuple[FoundPack, ...]:
        """Return every pack that was named, in the order in which they are asked."""
        found = self._found.get("packs")
        if found is not None:
            return found
        try:
            found = tuple(_find(self._settings, self._warn))
        except OSError as error:  # of the look for installed packages, and may pass
            self._warn(f"errno {error.errno}", f"packs of installed packages cannot be looked for: {error_text(error)}")
            return ()
        # setdefault: of two threads that come first at once, both get the one answer.
        return self._found.setdefault("packs", found)

    def versions(self, key: str) -> set[str]:
        """Return the NVRTC versions that built ``key`` in some pack."""
        return set(self._by_key().get(key, ()))

    def try_load(self, key: str, nvrtc_version: str, spec: KernelSpec) -> Cubin | None:
        """Return a cubin out of a pack; one that turns out to be damaged serves nothing any more."""
        while (held := self._by_key().get(key, {}).get(nvrtc_version)) is not None:
            pack, entry = held
            try:
                faults = entry.mismatches(spec)
                if not faults:
                    return pack.load_cubin(entry)
                reason = f"holds another kernel under {key}: {'; '.join(faults)}"
            except DamagedError as damaged:
                reason = damaged.reason
            except OSError as error:  # may pass; the pack is asked again for the next kernel
                self._warn(f"pack {pack.path}", f"pack {pack.path} cannot be read: {error_text(error)}")
                return None
            self._dropped.add(pack.path)
            self._index.clear()
            self._warn(f"pack {pack.path}", _ignored(pack.path, reason))
        return None

    def _by_key(self) -> Mapping[str, Mapping[str, tuple[Pack, Entry]]]:
        index = self._index.get("index")
        if index is not None:
            return index
        index = self._indexed()
        return self._index.setdefault("index", index) if "packs" in self._found else index

    def _indexed(self) -> dict[str, dict[str, tuple[Pack, Entry]]]:
        index: dict[str, dict[str, tuple[Pack, Entry]]] = {}
        for found in self.found():
            if found.pack is None:
                self._warn(f"pack {found.path}", _ignored(found.path, found.reason))
            elif found.path not in self._dropped:
                for entry in found.pack.entries:
                    index.setdefault(entry.key, {}).setdefault(entry.nvrtc_version, (found.pack, entry))
        return index


def _ignored(path: Path, reason: str) -> str:
    return f"pack {path} is ignored: {reason}"


def _find(settings: Settings, warn: Callable[[str, str], None]) -> Iterator[FoundPack]:
    origin = settings.origin("packs")
    for path in settings.packs:
        yield _opened(path, f"{PREFIX}PACKS" if origin == "default" else origin, from_package=False)
    for value, name in sorted(_points(warn)):
        origin = f"package {value}"
        try:
            packaged = _try_packaged(name, value)
        except Exception as error:  # noqa: BLE001 - a finder that some package hooked into the import system may raise anything
            _raise_what_may_pass(error)
            yield FoundPack(Path(name), origin, None, f"{origin} cannot be looked for: {shown(error, _MOST_TEXT)}")
            continue
        if packaged is None:
            yield FoundPack(Path(name), origin, None, f"{origin} is not installed as a folder that holds it")
        else:
            yield _opened(packaged, origin, from_package=True)


def _points(warn: Callable[[str, str], None]) -> set[tuple[str, str]]:
    """Return value and name of the entry points of packs; whose metadata is broken is told to ``warn`` and has none.

    ``metadata.entry_points`` would raise for all what one of them is broken by.
    """
    points: dict[str, set[tuple[str, str]]] = {}
    for distribution in _distributions(warn):
        try:
            found = {(point.value, point.name) for point in distribution.entry_points if point.group == ENTRY_POINTS}
            if found:
                # What lies later on the path is shadowed, as its modules are.
                points.setdefault(distribution.name or _name(distribution), found)
        except Exception as error:  # noqa: BLE001 - somebody else's files, read by code that raises whatever they lead to
            _raise_what_may_pass(error)
            name = _name(distribution)
            warn(f"distribution {name}", f"packs of distribution {name} are ignored: {shown(error, _MOST_TEXT)}")
    return {point for found in points.values() for point in found}


def _distributions(warn: Callable[[str, str], None]) -> Iterator[metadata.Distribution]:
    """Yield what each finder of the import system finds installed; one that raises hides nothing of the others."""
    for finder in list(sys.meta_path):
        try:
            find = getattr(finder, "find_distributions", None)
            if find is not None:
                yield from find(metadata.DistributionFinder.Context())
        except Exception as error:  # noqa: BLE001 - whatever some package has hooked into the import system may raise anything
            _raise_what_may_pass(error)
            name = shown(finder)
            warn(f"finder {name}", f"packs that {name} finds are ignored: {shown(error, _MOST_TEXT)}")


def _name(distribution: metadata.Distribution) -> str:
    try:
        # Where it lies says it best, and is known whatever is wrong with its content.
        return str(getattr(distribution, "_path", None) or distribution.name)
    except Exception:  # noqa: BLE001 - its metadata is what is broken
        return shown(distribution)


def _raise_what_may_pass(error: Exception) -> None:
    if isinstance(error, OSError) and error.errno in _MAY_PASS:
        raise error


def _opened(path: Path, origin: str, *, from_package: bool) -> FoundPack:
    try:
        return FoundPack(path, origin, read_pack(path, from_package=from_package))
    except DamagedError as damaged:
        return FoundPack(path, origin, None, damaged.reason)
    except OSError as error:
        return FoundPack(path, origin, None, f"cannot be read: {error_text(error)}")


def _try_packaged(name: str, value: str) -> Path | None:
    """Return where the file that an entry point names lies; finding the top package imports none of it."""
    top, *parts = value.split(".")
    if name in ("", ".", "..") or "/" in name or not all(part.isidentifier() for part in (top, *parts)):
        return None
    spec = importlib.util.find_spec(top)
    folders = [Path(folder, *parts) for folder in (spec.submodule_search_locations or ())] if spec else []
    return next((folder / name for folder in folders if (folder / name).is_file()), None)
